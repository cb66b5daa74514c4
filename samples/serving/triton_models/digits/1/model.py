"""A plan as a model of Triton Inference Server's Python backend; rows.py and model.plan belong beside this file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as triton
from rows import Rows

import nimblert


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the plan, on the GPU of this instance where it has one."""
        device = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else 0
        self._model = nimblert.load(Path(__file__).with_name("model.plan"), device=device)
        self._plan = Rows(self._model)
        if not self._plan.batch:
            raise triton.TritonModelException("the plan's batch cannot be padded and split: requests cannot be joined")
        most = json.loads(args["model_config"])["max_batch_size"]
        if self._plan.batch == 1 < most:
            found = f"the plan takes one row, and max_batch_size is {most}"
            raise triton.TritonModelException(f"{found}: compile it for several sizes, or write 1 in config.pbtxt")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response to each of these requests, which run as one batch; an invalid one fails alone."""
        responses: list[Any] = [None] * len(requests)
        calls, places = [], []
        for place, request in enumerate(requests):
            given = {t.name: triton.get_input_tensor_by_name(request, t.name) for t in self._plan.inputs}
            found = {name: tensor.as_numpy() for name, tensor in given.items() if tensor is not None}
            try:
                self._plan.check(found)
            except nimblert.InputError as exc:
                responses[place] = _refusal(exc)
                continue
            calls.append(found)
            places.append(place)
        for place, outcome in zip(places, self._plan.run_each(calls) if calls else (), strict=True):
            if isinstance(outcome, nimblert.InputError):
                responses[place] = _refusal(outcome)
                continue
            wanted = requests[place].requested_output_names()
            tensors = [triton.Tensor(name, array) for name, array in outcome.items() if name in wanted]
            responses[place] = triton.InferenceResponse(output_tensors=tensors)
        return responses

    def finalize(self) -> None:
        """Give back the plan's memory."""
        self._model.close()


def _refusal(error: nimblert.InputError) -> Any:
    """Return the response to an invalid request."""
    return triton.InferenceResponse(error=triton.TritonError(str(error), triton.TritonError.INVALID_ARG))
