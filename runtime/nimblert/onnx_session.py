"""The only file that imports onnxruntime: sessions for the kernels of a CPU plan.

onnxruntime is imported when the first CPU plan is loaded, not before.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from math import prod
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np

from nimblert.dtypes import numpy_dtype
from nimblert.errors import DeviceMismatchError, PlanFormatError, PlanInvalidError
from nimblert.host_memory import HostMemory, HostWeights
from nimblert.limits import DEFAULT_LIMITS
from nimblert.onnx_join import Bound, Chain, Joined
from nimblert.onnx_model import ELEMENT_TYPES, Model, read_model
from nimblert.onnx_rules import EXTERNAL_FILE, ORIGIN
from nimblert.plan import ITEM_NBYTES, Kernel, Launch, Parameter, ParameterKind, Plan, Pointer, Region
from nimblert.protobuf import Budget
from nimblert.scratch import scratch_folder

NO_PACKED_COPIES = ("session.disable_prepacking", "1")
"""For a session that will not compute: kernels make no copy of weights in the order they like best."""

_TYPE_NAMES = {dtype: f"tensor({dtype})" for dtype in ELEMENT_TYPES} | {
    "float32": "tensor(float)",
    "float64": "tensor(double)",
}
"""ONNX Runtime's name of each dtype."""

_REORDER_MODEL = bytes.fromhex(
    "08083a560a290a0178120179220c52656f72646572496e7075743a13636f6d2e6d6963726f736f66742e6e6368776312"
    "01675a1b0a017812160a14080112100a0208010a0208040a0208010a02080162090a017912040a02080142040a001011"
    "42170a13636f6d2e6d6963726f736f66742e6e636877631001"
)
"""ReorderInput of a (1, 4, 1, 1) float32 tensor x into y: its channels come out rounded up to a block.
Serialized with the onnx package, which the runtime does not import."""

_THREADED_NBYTES = 128 << 10
"""A kernel that touches less than this runs on its stream's thread alone: waking others takes longer."""

_STEPPED = frozenset({"RNN", "GRU", "LSTM", "com.microsoft.DynamicQuantizeLSTM"})
"""So do these: they would wake the others at every step of time (a GRU of 64 steps: 0.9 ms alone, 32 with two)."""

_pool_is_shared = threading.Event()

_THREAD_BUDGET = 256
"""At most about so many threads in the pools of one program's sessions together."""


@cache
def onnxruntime() -> ModuleType:
    """The onnxruntime package, which reports on the models that it opens only where the user asked for that."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when it is imported, by versions from 1.29 on
    try:
        return import_module("onnxruntime")
    except ImportError as exc:
        raise DeviceMismatchError("a CPU plan runs on ONNX Runtime: pip install 'nimblert[cpu]'") from exc


def share_thread_pool() -> None:
    """Let all sessions opened from now on share one pool with a thread for each core.

    The fastest way to run kernels one after the other: the threads of one pool may spin, and need no
    waking. But ONNX Runtime refuses every later `InferenceSession(model)` of default options in a
    process that has such a pool. So a library may not ask for it unbidden; a process of our own may.
    """
    if not _pool_is_shared.is_set():
        ort = onnxruntime()
        with contextlib.suppress(ort.capi.onnxruntime_pybind11_state.Fail):  # the process has one already
            ort.set_global_thread_pool_sizes(0, 1)  # 0: as many threads as a session of its own would have
        _pool_is_shared.set()


def session_options(threads: int = 1) -> Any:
    """SessionOptions for sessions of ``threads`` threads (the caller's included), silent on stderr.

    Threads of a session sleep while it does not run: those of many sessions, spinning as is ONNX
    Runtime's custom, would take the cores from the one that runs (measured: 15 times slower).
    """
    options = onnxruntime().SessionOptions()
    if _pool_is_shared.is_set():
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # failures come as exceptions
    return options


@cache
def runtime_errors() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises: its status codes have no common class but Exception."""
    state = onnxruntime().capi.onnxruntime_pybind11_state
    names = (
        "Fail",
        "InvalidArgument",
        "NoSuchFile",
        "NoModel",
        "EngineError",
        "RuntimeException",
        "InvalidProtobuf",
        "NotImplemented",
        "InvalidGraph",
        "EPFail",
    )
    return (RuntimeError, ValueError, *(getattr(state, name) for name in names))


@cache
def nchwc_block_size() -> int:
    """Channels in a block of ONNX Runtime's own convolution layout on this machine (8 or 16; 1: none)."""
    try:
        (reordered,) = open_session(_REORDER_MODEL).run(None, {"x": np.zeros((1, 4, 1, 1), np.float32)})
    except runtime_errors():
        return 1
    return int(reordered.shape[1])


def run_options() -> Any:
    """RunOptions for the launches of one program in one context, so that `nimblert.streams` can end them all."""
    return onnxruntime().RunOptions()


def open_session(
    code: bytes,
    initializers: dict[str, Any] | None = None,
    folder: str = "/nonexistent",
    threads: int = 1,
    *,
    packed_copies: bool = True,
) -> Any:
    """An InferenceSession that runs the model as it is written.

    ``initializers`` are OrtValues by name, used where they lie; but of some weights (MatMul, Gemm,
    LSTM ...) kernels keep a packed copy, which is faster and rounds differently, unless
    ``packed_copies`` is false. Files that the model names are looked for in ``folder`` only.
    """
    ort = onnxruntime()
    options = session_options(threads)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False  # one arena a session would keep each kernel's largest workspace
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    if not packed_copies:
        options.add_session_config_entry(*NO_PACKED_COPIES)
    for name, value in (initializers or {}).items():
        options.add_initializer(name, value)
    return ort.InferenceSession(code, options, providers=["CPUExecutionProvider"])


def ort_value(array: np.ndarray, dtype: str) -> Any:
    """An OrtValue over the memory of ``array``, which it does not copy."""
    return onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(array, ELEMENT_TYPES[dtype])


@contextlib.contextmanager
def initializer_folder() -> Iterator[str]:
    """A folder that holds nothing but the empty file that initializers name."""
    with scratch_folder() as folder:
        (folder / EXTERNAL_FILE).touch()
        yield str(folder)


class SessionCache:
    """The sessions of a plan, one for each kernel and its initializers, whatever launches it and in which memory.

    Launches are bound in a ``with`` block, by one thread at a time: sessions and bindings outlive it,
    the placeholder file of initializers does not.
    """

    def __init__(self, plan: Plan, weights: HostWeights) -> None:
        self._plan = plan
        self._weights = weights
        self._threads = _threads(plan)
        self._models: dict[int, Model] = {}
        self._sessions: dict[tuple[object, ...], Any] = {}
        self._lock = threading.Lock()
        self._resources = contextlib.ExitStack()
        for origin in sorted({module.origin for module in plan.modules}):
            _check_origin(origin)

    def over(self, weights: HostWeights) -> "SessionCache":
        """The sessions over other weights: those that read none of the changed ones are the same."""
        made = SessionCache(self._plan, weights)
        made._models |= self._models
        made._sessions |= {
            key: session
            for key, session in self._sessions.items()
            if all(weights.same(self._weights, pointer.offset) for pointer in key[1:] if isinstance(pointer, Pointer))
        }
        return made

    def __len__(self) -> int:
        """The sessions that were opened."""
        return len(self._sessions)

    def __enter__(self) -> Self:
        self._lock.acquire()
        try:
            self._folder = self._resources.enter_context(initializer_folder())
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._resources.close()
        finally:
            self._lock.release()

    def model(self, module: int) -> Model:
        """The model of a module, or an empty one where the bytes are none."""
        if module not in self._models:
            try:
                code = bytes(self._plan.modules[module].code)
                self._models[module] = read_model(code, Budget(DEFAULT_LIMITS.model_fields))
            except PlanFormatError:
                self._models[module] = Model()
        return self._models[module]

    def bind(self, launch: Launch, memory: HostMemory, options: Any, where: str) -> "partial[object]":
        """A call that runs the launch in ``memory``, under these RunOptions.

        Raises PlanInvalidError where kernel and launch do not fit.
        """
        kernel = self._plan.kernels[launch.kernel]
        pointers = {relocation.param_offset: relocation.pointer for relocation in launch.relocations}
        if sorted(pointers) != sorted(p.offset for p in kernel.parameters):
            raise PlanInvalidError([f"{where}: its relocations do not match the parameters of kernel {launch.kernel}"])
        bound = [Bound(name=p.name, parameter=p, pointer=pointers[p.offset]) for p in kernel.parameters]
        of_kind = {kind: tuple(b for b in bound if b.parameter.kind is kind) for kind in ParameterKind}
        model = Joined(
            code=bytes(self._plan.modules[kernel.module].code),
            inputs=of_kind[ParameterKind.INPUT],
            outputs=of_kind[ParameterKind.OUTPUT],
            initializers=of_kind[ParameterKind.INITIALIZER],
        )
        return self.bind_model(model, memory, options, kernel.symbol, threaded=_is_threaded(kernel))

    def bind_chain(
        self, launches: Sequence[Launch], chain: Chain, memory: HostMemory, options: Any
    ) -> "partial[object]":
        """A call that runs several launches as one model."""
        kernels = [self._plan.kernels[launch.kernel] for launch in launches]
        symbol = f"{kernels[0].symbol} to {kernels[-1].symbol}"
        threaded = any(map(_is_threaded, kernels))
        return self.bind_model(chain.joined(), memory, options, symbol, threaded=threaded)

    def bind_model(
        self, model: Joined, memory: HostMemory, options: Any, symbol: str, *, threaded: bool
    ) -> "partial[object]":
        """A call that runs a model on what its values are bound to."""
        key = (model.code, *(bound.pointer for bound in model.initializers))
        if key not in self._sessions:
            self._sessions[key] = self._open(model, symbol, threads=self._threads if threaded else 1)
        session = self._sessions[key]
        binding = session.io_binding()
        sides = (model.inputs, binding.bind_input), (model.outputs, binding.bind_output)
        for (values, bind), written in zip(sides, (False, True), strict=True):
            for value in values:
                parameter = value.parameter
                array = memory.array(value.pointer, parameter.dtype, parameter.shape, written=written)
                bind(value.name, "cpu", 0, _element_type(parameter, array), parameter.shape, array.ctypes.data)
        # The method of the extension itself: 1.6 us a call where the Python wrapper around it takes 5
        # (30 with RunOptions), most of it to look for a WebGPU graph.
        return partial(session._sess.run_with_iobinding, binding._iobinding, options)  # noqa: SLF001

    def _value(self, parameter: Parameter, pointer: Pointer) -> Any:
        """An initializer, where it lies among the weights; all of it must lie in one of them."""
        if pointer.region is not Region.WEIGHTS:
            raise PlanInvalidError([f"initializer {parameter.name!r}: in {pointer.region.name}, expected WEIGHTS"])
        weight, start = self._weights.find(pointer.offset)
        nbytes = prod(parameter.shape) * ITEM_NBYTES[parameter.dtype]
        if start + nbytes > weight.nbytes:
            raise PlanInvalidError([f"initializer {parameter.name!r}: its {nbytes} bytes are in no one weight"])
        array = weight[start : start + nbytes].view(numpy_dtype(parameter.dtype)).reshape(parameter.shape)
        return ort_value(array, parameter.dtype)

    def _open(self, model: Joined, symbol: str, threads: int) -> Any:
        try:
            initializers = {bound.name: self._value(bound.parameter, bound.pointer) for bound in model.initializers}
            session = open_session(model.code, initializers, self._folder, threads)
        except runtime_errors() as exc:
            version = onnxruntime().__version__
            raise PlanInvalidError([f"kernel {symbol}: ONNX Runtime {version} refuses its model: {exc}"]) from exc
        declared = {tensor.name: tensor.type for tensor in (*session.get_inputs(), *session.get_outputs())}
        bound = {value.name: _TYPE_NAMES[value.parameter.dtype] for value in (*model.inputs, *model.outputs)}
        if declared != bound:
            raise PlanInvalidError([f"kernel {symbol}: parameters {bound}, its model has {declared}"])
        return session


def _is_threaded(kernel: Kernel) -> bool:
    """Whether several threads are worth their waking."""
    touched_nbytes = sum(prod(p.shape) * ITEM_NBYTES[p.dtype] for p in kernel.parameters)
    return touched_nbytes >= _THREADED_NBYTES and kernel.symbol not in _STEPPED


def _threads(plan: Plan) -> int:
    """Threads of each session that has any of its own: streams share the cores, sessions the budget."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    launches = [c for program in plan.programs for c in program.commands if isinstance(c, Launch)]
    large = sum(_is_threaded(plan.kernels[launch.kernel]) for launch in launches)
    streams = max(program.stream_count for program in plan.programs)
    return max(1, min(cores // max(streams, 1), _THREAD_BUDGET // max(large, 1)))


def _element_type(parameter: Parameter, array: np.ndarray) -> Any:
    """What IOBinding wants: numpy's type, or ONNX's number where numpy has none of its own."""
    return array.dtype.type if array.dtype.isbuiltin == 1 else ELEMENT_TYPES[parameter.dtype]


def _check_origin(origin: str) -> None:
    """Raise DeviceMismatchError where weights are in blocks of another size than this CPU's."""
    name, _, layout = origin.partition(" ")
    if name != ORIGIN:
        raise PlanInvalidError([f"module of origin {origin!r}: a CPU plan has modules of {ORIGIN} only"])
    if layout and layout != f"nchwc{nchwc_block_size()}":
        raise DeviceMismatchError(
            f"the plan was made for a CPU with convolution layout {layout}, this one has nchwc{nchwc_block_size()}: "
            f"compile it again here"
        )
