"""Serve plans with MLServer, which speaks the Open Inference Protocol, version 2, over HTTP and gRPC.

Usage: ``mlserver start samples/serving``. The file mlserver/model-settings.json names the model and its plan, and says
for how many seconds a batch waits for requests to join it. MLServer's own batching stays off: it joins the values of
requests before their shapes are checked.
"""

from collections.abc import Sequence

import mlserver
import numpy as np
from mlserver.errors import InferenceError
from mlserver.types import Datatype, InferenceRequest, InferenceResponse, MetadataTensor, RequestInput, ResponseOutput
from mlserver.utils import get_model_uri
from oip import DATATYPES, ProtocolError, listed_array
from rows import Batches, Rows

import nimblert


class PlanModel(mlserver.MLModel):
    """A plan as a model of MLServer."""

    async def load(self) -> bool:
        """Load the plan that the settings name."""
        self._model = nimblert.load(await get_model_uri(self.settings))
        self._plan = Rows(self._model)
        self._batches = Batches(self._plan, **self.settings.parameters.extra)
        for side in ("inputs", "outputs"):
            tensors = [
                MetadataTensor(name=t.name, datatype=DATATYPES[t.dtype], shape=[-1, *t.shape[1:]])
                for t in getattr(self._plan, side)
            ]
            setattr(self, side, tensors)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Outputs for inputs of any number of rows."""
        try:
            outputs = await self._batches.run(_arrays(payload.inputs))
        except (ValueError, TypeError, OverflowError) as exc:  # an InputError, or numpy's: values that do not fit
            raise InferenceError(str(exc)) from exc
        wanted = [output.name for output in payload.outputs or ()]
        if unknown := [name for name in wanted if name not in outputs]:
            raise InferenceError(f"output {unknown[0]!r}: not found, the model has {list(outputs)}")
        return InferenceResponse(
            model_name=self.name, outputs=[_encoded(name, outputs[name]) for name in wanted or outputs]
        )

    async def unload(self) -> bool:
        """Give back the plan's memory, after the runs that are left."""
        self._model.close()
        return True


def _arrays(inputs: Sequence[RequestInput]) -> dict[str, np.ndarray]:
    """The arrays of a request; MLServer's codec would convert values of another kind. Raises ProtocolError."""
    arrays: dict[str, np.ndarray] = {}
    for given in inputs:
        if given.name in arrays:
            raise ProtocolError(f"input {given.name!r} was given twice: give it once")
        datatype, values = Datatype(given.datatype).value, getattr(given.data, "root", given.data)
        arrays[given.name] = listed_array(given.name, datatype, tuple(given.shape), values)
    return arrays


def _encoded(name: str, array: np.ndarray) -> ResponseOutput:
    """An output in its own shape: MLServer's codec would add a dimension to one that has a single dimension."""
    return ResponseOutput(
        name=name, datatype=DATATYPES[str(array.dtype)], shape=list(array.shape), data=array.ravel().tolist()
    )
