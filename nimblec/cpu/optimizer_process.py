"""Run ONNX Runtime's optimiser, in this process or, run as a script, for the one that started it.

The script takes requests from standard input, each a line of JSON and then the bytes of the model, and answers each
with a line of JSON. It imports nothing of nimblec, so that it starts in a tenth of a second, until it is asked to
observe the shapes of a model, whose large constants follow the model.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module

INLINE_NBYTES = 1024
"""Smaller initializers stay in the protobuf of the saved model."""

EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
"""The setting that lets a session that is opened on bytes find its external data."""


class RefusedError(Exception):
    """ONNX Runtime refuses a model; in its own words."""


def save_optimized(model: bytes, request: Mapping[str, str]) -> None:
    """Save a model as ONNX Runtime would run it, in the file ``path`` and, its large data, in ``weights`` beside it.

    ``level`` of the request is the name of a GraphOptimizationLevel, ``without`` has those of optimisers to leave out,
    ``folder`` has the model's external data. Raises RefusedError and MemoryError.
    """
    ort = import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # failures are exceptions
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, request["level"])
    options.optimized_model_filepath = request["path"]
    for key, value in (
        ("session.disable_prepacking", "1"),
        (EXTERNAL_DATA_FOLDER, request["folder"]),
        ("session.optimized_model_external_initializers_file_name", request["weights"]),
        ("session.optimized_model_external_initializers_min_size_in_bytes", str(INLINE_NBYTES)),
    ):
        options.add_session_config_entry(key, value)
    try:
        ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=request["without"].split()
        )
    except MemoryError:
        raise
    except Exception as exc:  # those of ONNX Runtime have no other common class
        raise RefusedError(str(exc)) from exc


def _serve() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the compiler ends this process
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    import_module("onnxruntime")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        model = sys.stdin.buffer.read(request["nbytes"])
        answer: dict[str, object] = {}
        try:
            if "observe" in request:
                answer = {"shapes": _observed(model, **request["observe"])}
            else:
                save_optimized(model, request)
        except (RefusedError, MemoryError) as exc:
            answer = {type(exc).__name__: str(exc)}
        print(json.dumps(answer), file=answers, flush=True)


def _observed(model: bytes, constants: Mapping[str, object], **request: object) -> object:
    observation = import_module("nimblec.cpu.observation")
    arrays = observation.read_arrays(sys.stdin.buffer, constants)
    try:
        return observation.observe_shapes(model, arrays, **request)
    except observation.RefusedError as exc:  # that of nimblec.cpu.optimizer_process, where this is __main__
        raise RefusedError(str(exc)) from exc


if __name__ == "__main__":
    _serve()
