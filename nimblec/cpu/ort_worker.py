"""Optimise and run ONNX models with ONNX Runtime; as a script, for the process that started it.

A model that was never checked may end the process that runs it. The script reads requests from standard input, each a
line of JSON, then the bytes of a model, then those of arrays, and answers each with a line of JSON and the bytes of
arrays. It imports nothing of nimblec, so that it starts in a tenth of a second.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

if TYPE_CHECKING:
    import numpy as np

INLINE_NBYTES = 1024
"""Smaller initializers stay in the protobuf of the saved model."""

EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
"""The setting that lets a session that is opened on bytes find its external data."""

_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)

Feed: TypeAlias = "Mapping[str, np.ndarray]"
Described: TypeAlias = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype and shape of each of several arrays."""


Value: TypeAlias = "tuple[list[int] | None, np.ndarray | None]"
"""Shape and elements of an output: no shape if it is no tensor, no elements if numpy lacks its dtype."""

_NUMPY_TYPES = frozenset(
    f"tensor({name})"
    for name in (
        *("bool", "float", "double", "float16", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
)


class RefusedError(Exception):
    """ONNX Runtime refuses a model or a run, in its own words."""


def optimize(
    model: bytes, *, level: str, without: Sequence[str], settings: Mapping[str, str], folder: str, path: str, log: str
) -> None:
    """Save a model as ONNX Runtime's optimiser leaves it, in the file ``path``, and its large data beside it.

    ``level`` is the name of a GraphOptimizationLevel, ``without`` has the names of optimisers to leave out,
    ``settings`` are entries of the session's configuration, ``folder`` has the model's external data. The large data
    have the name of ``path`` with ".weights" added. ONNX Runtime logs into the file ``log``. Raises RefusedError and
    MemoryError.
    """
    ort = import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 1  # information: which optimisers changed the model
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.optimized_model_filepath = path
    for key, value in {
        "session.disable_prepacking": "1",
        EXTERNAL_DATA_FOLDER: folder,
        "session.optimized_model_external_initializers_file_name": f"{os.path.basename(path)}.weights",  # noqa: PTH119
        "session.optimized_model_external_initializers_min_size_in_bytes": str(INLINE_NBYTES),
        **settings,
    }.items():
        options.add_session_config_entry(key, value)
    with _logging_to(log):
        _open(model, options, list(without))


def run(
    model: bytes, *, level: str, folder: str, threads: int, names: Sequence[str], feeds: Sequence[Feed]
) -> tuple[list[tuple[str, str, list[Any]]], list["list[Value] | str"]]:
    """Open a model and run it on each of ``feeds``, inputs by name.

    Returns the name, type and shape of each output as ONNX Runtime infers them, and for each feed the outputs
    ``names`` or, where the run fails, ONNX Runtime's words. ``level``, ``folder``: see `optimize`; ``threads``: 0 for
    as many as there are processors. Raises RefusedError where the model cannot be opened, and MemoryError.
    """
    ort = import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # failures are exceptions
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.add_session_config_entry(EXTERNAL_DATA_FOLDER, folder)
    session = _open(model, options)
    described = [(value.name, value.type, list(value.shape)) for value in session.get_outputs()]
    results: list[list[Value] | str] = []
    for feed in feeds:
        try:
            given = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
            results.append([_value(made) for made in session.run_with_ort_values(list(names), given)])
        except MemoryError:
            raise
        except Exception as exc:  # noqa: BLE001 - those of ONNX Runtime have no other common class
            results.append(str(exc))
    return described, results


def _value(made: Any) -> "Value":
    if not made.is_tensor():
        return None, None
    has_array = made.data_type() in _NUMPY_TYPES
    return list(made.shape()), made.numpy() if has_array else None


def _open(model: bytes, options: Any, without: Sequence[str] = ()) -> Any:
    ort = import_module("onnxruntime")
    try:
        return ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without)
        )
    except MemoryError:
        raise
    # ONNX Runtime's exceptions have no other common class.
    except Exception as exc:
        raise RefusedError(str(exc)) from exc


@contextmanager
def _logging_to(path: str) -> Iterator[None]:
    """Send what is written to standard error into a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.dup2(file, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(file)


def _serve() -> None:
    """Answer requests until there are no more, or the process that sends them is gone."""
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the compiler ends this process
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    import_module("onnxruntime")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        model = sys.stdin.buffer.read(request["nbytes"])
        arrays: list[np.ndarray] = []
        try:
            if "optimize" in request:
                optimize(model, **request["optimize"])
                answer: dict[str, object] = {}
            else:
                feeds = [read_arrays(sys.stdin.buffer, described) for described in request["feeds"]]
                described, results = run(model, feeds=feeds, **request["run"])
                made = [value for result in results if not isinstance(result, str) for value in result]
                arrays = [array for _, array in made if array is not None]
                answer = {
                    "described": described,
                    "results": [
                        r if isinstance(r, str) else [(s, a is not None and a.dtype.name) for s, a in r]
                        for r in results
                    ],
                }
        except (RefusedError, MemoryError) as exc:
            answer = {type(exc).__name__: str(exc)}
        answers.write(json.dumps(answer).encode() + b"\n")
        for array in arrays:
            answers.write(content(array))
        answers.flush()
        trim_memory()


def trim_memory() -> None:
    """Give freed memory back to the system: glibc keeps much of that of a session's packed weights."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def content(array: "np.ndarray") -> memoryview:
    """Return the bytes of an array in C order."""
    np = import_module("numpy")
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def read_arrays(stream: BinaryIO, described: Described) -> "dict[str, np.ndarray]":
    """Return the arrays whose bytes follow one another in ``stream``."""
    np = import_module("numpy")
    arrays = {}
    for name, dtype, shape in described:
        arrays[name] = np.empty(shape, dtype)
        stream.readinto(memoryview(arrays[name].reshape(-1).view(np.uint8)))  # type: ignore[attr-defined]
    return arrays


if __name__ == "__main__":
    _serve()
