"""The only file that imports onnxruntime: sessions for the kernels of a CPU plan.

onnxruntime is imported when the first CPU plan is loaded, not before.
"""

import contextlib
import ctypes
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from itertools import groupby, islice
from math import prod
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np

from nimblert.arrays.layouts import numpy_dtype
from nimblert.check import division
from nimblert.check.onnx_model import ELEMENT_TYPES, Model, read_model
from nimblert.check.onnx_rules import EXTERNAL_FILE, ORIGIN
from nimblert.check.protobuf import Budget
from nimblert.cpu import onnx_threads
from nimblert.cpu.dataflow import dataflow
from nimblert.cpu.host_memory import HostMemory, HostWeights
from nimblert.cpu.onnx_join import Bound, Joined, Part, Shapes, join
from nimblert.cpu.onnx_threads import Pool, Threads, Waiting
from nimblert.errors import DeviceMismatchError, PlanFormatError, PlanInvalidError
from nimblert.plan import ITEM_NBYTES, Launch, Parameter, ParameterKind, Plan, Pointer, Program, Region
from nimblert.plan.files import scratch_folder
from nimblert.plan.records import DEFAULT_LIMITS, Limits

NO_PACKED_COPIES = ("session.disable_prepacking", "1")
"""For a session that will not compute: kernels make no packed copies of weights."""

LABEL = "command_"
"""The start of the names of nodes in a joined model; the index of the command follows."""

_LARGEST_NBYTES = 32 << 10
"""The largest model of several launches that joins others: a joined model repeats the constants of each launch."""

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
"""ReorderInput of a (1, 4, 1, 1) float32 tensor x into y, whose channels are rounded up to a block.
Serialized with the onnx package, which the runtime does not import."""


@cache
def onnxruntime() -> ModuleType:
    """The onnxruntime package, with telemetry off unless the user has set ORT_DISABLE_TELEMETRY."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at import, since version 1.29
    try:
        return import_module("onnxruntime")
    except ImportError as exc:
        raise DeviceMismatchError("a CPU plan runs on ONNX Runtime: pip install 'nimblert[cpu]'") from exc


def session_options(pool: Pool | None = None) -> Any:
    """SessionOptions for these threads, by default the caller's alone, with nothing logged."""
    pool = pool or Pool()
    options = onnxruntime().SessionOptions()
    options.intra_op_num_threads = pool.count
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # an arena keeps each kernel's largest workspace
    if pool.processors[1:]:
        places = ";".join(str(processor + 1) for processor in pool.processors[1:])
        options.add_session_config_entry("session.intra_op_thread_affinities", places)
    if pool.waiting is Waiting.SLEEPING:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    elif pool.waiting is Waiting.SPINNING_IN_RUNS:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 4  # failures are exceptions
    return options


@cache
def runtime_errors() -> tuple[type[Exception], ...]:
    """The exceptions of ONNX Runtime, which have no common class but Exception."""
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
    """RunOptions for the launches of one program in one context, by which `nimblert.cpu.streams` can end them all."""
    return onnxruntime().RunOptions()


def open_session(
    code: bytes, initializers: dict[str, Any] | None = None, folder: str = "/nonexistent", options: Any = None
) -> Any:
    """An InferenceSession that runs the model without optimizing it.

    ``initializers`` are OrtValues by name, used in place; but kernels keep packed copies of some weights (MatMul, Gemm,
    LSTM ...), which are faster and round differently, unless ``options``, from `session_options`, forbid that.
    External data of the model is looked for in ``folder`` only.
    """
    ort = onnxruntime()
    options = options or session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    for name, value in (initializers or {}).items():
        options.add_initializer(name, value)
    return ort.InferenceSession(code, options, providers=["CPUExecutionProvider"])


def ort_value(array: np.ndarray, dtype: str) -> Any:
    """An OrtValue over the memory of ``array``, without a copy."""
    return onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(array, ELEMENT_TYPES[dtype])


@contextlib.contextmanager
def initializer_folder() -> Iterator[str]:
    """A folder with only the empty file that initializers name."""
    with scratch_folder() as folder:
        (folder / EXTERNAL_FILE).touch()
        yield str(folder)


class _Opened:
    """A session, and the weights that it was opened over, to which it has no references of its own."""

    def __init__(self, session: Any, weights: Mapping[str, np.ndarray]) -> None:
        self.session = session
        self.weights = weights


_opened: weakref.WeakValueDictionary[tuple[object, ...], _Opened] = weakref.WeakValueDictionary()
"""The sessions of this process by everything that they depend on: a plan that is loaded twice shares them."""


def _keep_for_ever() -> None:
    """Free no session in a forked child: the destructor waits for threads that only the parent has."""
    for opened in list(_opened.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_for_ever)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Launches of a stream that one session runs: the indices of their commands.

    ``model`` is their joined model; None for a single launch.
    """

    launches: tuple[int, ...]
    model: Joined | None
    pool: Pool


class _Code:
    """The code of a kernel, copied and examined once: it is a part of the keys of sessions, which hash it."""

    def __init__(self, code: memoryview, parameters: Sequence[Parameter]) -> None:
        self.code = bytes(code)
        self._parameters = parameters

    @cached_property
    def model(self) -> Model:
        """An empty one where the bytes are not a model."""
        try:
            return read_model(self.code, Budget(DEFAULT_LIMITS.model_fields))
        except PlanFormatError:
            return Model()

    @cached_property
    def division(self) -> tuple[division.Operand, division.Operand] | None:
        """Dividend and divisor that must be checked before each run; None for kernels that need no check."""
        graph = self.model.graph
        return division.operands(graph, self._parameters) if graph is not None and len(graph.node) == 1 else None


class SessionCache:
    """The sessions of a plan: one for each model and its initializers, shared by all launches and contexts.

    Launches are bound in a block of ``with sessions.lock, sessions``, which may be nested. Sessions and bindings
    outlive it; the placeholder file of initializers does not. The lock is the interpreter's own, so that no exception
    of a signal handler comes between it and the block.
    """

    def __init__(
        self, plan: Plan, weights: HostWeights, threads: Threads | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._plan = plan
        self._weights = weights
        self._threads = onnx_threads.checked(threads)
        self._limits = limits
        self._is_default = threads is None
        self._codes: dict[int, _Code] = {}
        """By the index of a kernel, which shares its module with no other."""
        self._stretches: dict[int, tuple[Program, Mapping[int, Stretch]]] = {}
        """By the id of a program: hashing its value would take long."""
        self._sessions: dict[tuple[object, ...], _Opened] = {}
        self.lock = threading.RLock()
        self._entered = 0
        self._resources = contextlib.ExitStack()
        for origin in sorted({module.origin for module in plan.modules}):
            _check_origin(origin)

    def over(self, weights: HostWeights) -> "SessionCache":
        """A cache over other weights, with the sessions that read none of the changed ones."""
        made = SessionCache(self._plan, weights, limits=self._limits)
        made._threads, made._is_default = self._threads, self._is_default
        made._codes, made._stretches = self._codes, self._stretches
        made._sessions |= {
            key: session
            for key, session in self._sessions.items()
            if all(weights.same(self._weights, pointer.offset) for pointer in key[1:] if isinstance(pointer, Pointer))
        }
        return made

    def __len__(self) -> int:
        """The number of sessions."""
        return len(self._sessions)

    def __enter__(self) -> Self:
        if not self._entered:
            self._folder = self._resources.enter_context(initializer_folder())
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered -= 1
        if not self._entered:
            self._resources.close()
            self._weights.let_go()

    def stretches(self, program: Program) -> Mapping[int, Stretch]:
        """The stretches of a program by the index of their first launch.

        Raises PlanInvalidError where these and those of the programs before are beyond the limit.
        """
        if id(program) not in self._stretches:
            joined = list(islice(self._joined(program), self._limits.sessions + 1))
            if sum(len(found) for _, found in self._stretches.values()) + len(joined) > self._limits.sessions:
                limit = f"the limit, {self._limits.sessions}: raise it (nimblert.Limits) if you trust the plan"
                raise PlanInvalidError([f"program {program.name!r}: needs more sessions than {limit}"])
            kernels = [[part.kernel for part in parts] for parts, _ in joined]
            pools = onnx_threads.pools(kernels, program.stream_count, self._threads)
            self._stretches[id(program)] = (
                program,
                {
                    parts[0].index: Stretch(launches=tuple(part.index for part in parts), model=model, pool=pool)
                    for (parts, model), pool in zip(joined, pools, strict=True)
                },
            )
        return self._stretches[id(program)][1]

    def streams_by_thread(self, program: Program) -> list[range]:
        """Return the streams of a program that each thread runs; as many threads as streams unless a number is set."""
        most = None if self._is_default else self._threads[0]
        return onnx_threads.streams_by_thread(program.stream_count, most)

    def bind_stretch(self, program: Program, stretch: Stretch, memory: HostMemory, options: Any) -> "partial[object]":
        """A call that runs launches of the program in ``memory``, as `bind` does."""
        index = stretch.launches[0]
        first = program.commands[index]
        assert isinstance(first, Launch)
        if stretch.model is None:
            return self._bind_launch(first, memory, options, stretch.pool, f"commands[{index}]", keeps_memory=True)
        return self._bind(stretch.model, memory, options, stretch.pool, keeps_memory=True)

    def bind(self, launch: Launch, memory: HostMemory, options: Any, where: str) -> "partial[object]":
        """A call that runs one launch by itself in ``memory``, under these RunOptions.

        Raises PlanInvalidError where kernel and launch do not fit.
        """
        pool = onnx_threads.pool_of_one(self._plan.kernels[launch.kernel], self._launch_count, self._threads[0])
        return self._bind_launch(launch, memory, options, pool, where, keeps_memory=False)

    def _bind_launch(
        self, launch: Launch, memory: HostMemory, options: Any, pool: Pool, where: str, *, keeps_memory: bool
    ) -> "partial[object]":
        """A call that runs one launch by itself; it raises ValueError before a division that would end the process."""
        run = self._bind(self._whole(launch, where), memory, options, pool, keeps_memory=keeps_memory)
        operands = self._code(launch).division
        if operands is None:
            return run
        pointers = {relocation.param_offset: relocation.pointer for relocation in launch.relocations}
        arrays = (
            memory.array(pointers[operand.offset], operand.dtype, operand.shape)
            if isinstance(operand, Parameter)
            else operand
            for operand in operands
        )
        return partial(_checked_division, run, *arrays)

    @cached_property
    def _launch_count(self) -> int:
        return sum(isinstance(command, Launch) for program in self._plan.programs for command in program.commands)

    @cached_property
    def _launches(self) -> Counter[int]:
        """The number of launches of each kernel, in programs and refits."""
        programs = (*self._plan.programs, *self._plan.refits)
        return Counter(c.kernel for program in programs for c in program.commands if isinstance(c, Launch))

    def _joined(self, program: Program) -> Iterator[tuple[list[Part], Joined | None]]:
        flow = dataflow(program)
        for stream in range(program.stream_count):
            commands = ((i, command) for i, command in enumerate(program.commands) if command.stream == stream)
            for are_launches, group in groupby(commands, lambda indexed: isinstance(indexed[1], Launch)):
                if are_launches:
                    yield from join([self._part(i, c) for i, c in group if isinstance(c, Launch)], flow, self._derived)

    def _part(self, index: int, launch: Launch) -> Part:
        kernel, code = self._plan.kernels[launch.kernel], self._code(launch)
        is_large = len(code.code) > _LARGEST_NBYTES and self._launches[launch.kernel] > 1
        alone = is_large or code.division is not None
        return Part(index=index, launch=launch, kernel=kernel, model=code.model, alone=alone, label=f"{LABEL}{index}")

    def _code(self, launch: Launch) -> _Code:
        if launch.kernel not in self._codes:
            kernel = self._plan.kernels[launch.kernel]
            self._codes[launch.kernel] = _Code(self._plan.modules[kernel.module].code, kernel.parameters)
        return self._codes[launch.kernel]

    def _derived(self, model: Joined) -> Shapes:
        """The shapes of a model's outputs, as far as ONNX Runtime infers them without a run."""
        options = session_options()
        options.add_session_config_entry(*NO_PACKED_COPIES)
        weights = {bound.name: self._weight(bound) for bound in model.initializers}
        return {value.name: value.shape for value in self._open(model, weights, options).get_outputs()}

    def _whole(self, launch: Launch, where: str) -> Joined:
        """The unchanged model of a launch."""
        kernel = self._plan.kernels[launch.kernel]
        pointers = {relocation.param_offset: relocation.pointer for relocation in launch.relocations}
        if sorted(pointers) != sorted(p.offset for p in kernel.parameters):
            raise PlanInvalidError([f"{where}: its relocations do not match the parameters of kernel {launch.kernel}"])
        bound = [Bound(name=p.name, parameter=p, pointer=pointers[p.offset]) for p in kernel.parameters]
        of_kind = {kind: tuple(b for b in bound if b.parameter.kind is kind) for kind in ParameterKind}
        return Joined(
            symbol=kernel.symbol,
            code=self._code(launch).code,
            inputs=of_kind[ParameterKind.INPUT],
            outputs=of_kind[ParameterKind.OUTPUT],
            initializers=of_kind[ParameterKind.INITIALIZER],
        )

    def _bind(
        self, model: Joined, memory: HostMemory, options: Any, pool: Pool, *, keeps_memory: bool
    ) -> "partial[object]":
        """A call that runs a model on the memory that its values are bound to."""
        key = (model.code, *(bound.pointer for bound in model.initializers), pool, keeps_memory)
        if key not in self._sessions:
            self._sessions[key] = self._opened(model, pool, keeps_memory=keeps_memory)
        session = self._sessions[key].session
        binding = session.io_binding()
        sides = (model.inputs, binding.bind_input), (model.outputs, binding.bind_output)
        for (values, bind), written in zip(sides, (False, True), strict=True):
            for value in values:
                parameter = value.parameter
                array = memory.array(value.pointer, parameter.dtype, parameter.shape, written=written)
                bind(value.name, "cpu", 0, _element_type(parameter, array), parameter.shape, array.ctypes.data)
        # The extension's own method: 1.6 us a call, where its Python wrapper takes 5 (30 with RunOptions), most of that
        # to look for a WebGPU graph.
        return partial(session._sess.run_with_iobinding, binding._iobinding, options)  # noqa: SLF001

    def _opened(self, model: Joined, pool: Pool, *, keeps_memory: bool) -> _Opened:
        """The session of a model: one of this process with the same weights, or a new one."""
        weights = {bound.name: self._weight(bound) for bound in model.initializers}
        places = tuple(array.ctypes.data for array in weights.values())
        key = os.getpid(), model.code, places, pool, keeps_memory  # a child has none of the threads of its parent
        final = not any(array.flags.writeable for array in weights.values())
        opened = _opened.get(key) if final else None
        if opened is None:
            options = session_options(pool)
            options.enable_cpu_mem_arena = options.enable_mem_pattern = keeps_memory
            opened = _Opened(self._open(model, weights, options), weights)
        session = opened.session
        declared = {tensor.name: tensor.type for tensor in (*session.get_inputs(), *session.get_outputs())}
        bound = {value.name: _TYPE_NAMES[value.parameter.dtype] for value in (*model.inputs, *model.outputs)}
        if declared != bound:
            raise PlanInvalidError([f"kernel {model.symbol}: parameters {bound}, its model has {declared}"])
        return _opened.setdefault(key, opened) if final else opened

    def _weight(self, bound: Bound) -> np.ndarray:
        """The memory of an initializer, which must lie within one weight."""
        parameter, pointer = bound.parameter, bound.pointer
        if pointer.region is not Region.WEIGHTS:
            raise PlanInvalidError([f"initializer {parameter.name!r}: in {pointer.region.name}, expected WEIGHTS"])
        weight, start = self._weights.find(pointer.offset)
        nbytes = prod(parameter.shape) * ITEM_NBYTES[parameter.dtype]
        if start + nbytes > weight.nbytes:
            raise PlanInvalidError([f"initializer {parameter.name!r}: its {nbytes} bytes are in no one weight"])
        return weight[start : start + nbytes].view(numpy_dtype(parameter.dtype)).reshape(parameter.shape)

    def _open(self, model: Joined, weights: Mapping[str, np.ndarray], options: Any) -> Any:
        try:
            dtypes = {bound.name: bound.parameter.dtype for bound in model.initializers}
            values = {name: ort_value(array, dtypes[name]) for name, array in weights.items()}
            return open_session(model.code, values, self._folder, options)
        except runtime_errors() as exc:
            version = onnxruntime().__version__
            raise PlanInvalidError([f"kernel {model.symbol}: ONNX Runtime {version} refuses its model: {exc}"]) from exc


def _checked_division(run: "partial[object]", dividend: np.ndarray, divisor: np.ndarray) -> object:
    division.check(dividend, divisor)
    return run()


def _element_type(parameter: Parameter, array: np.ndarray) -> Any:
    """The element type for IOBinding: numpy's type, or ONNX's number for a dtype that numpy lacks."""
    return array.dtype.type if array.dtype.isbuiltin == 1 else ELEMENT_TYPES[parameter.dtype]


def _check_origin(origin: str) -> None:
    """Raise DeviceMismatchError where the plan's blocks of channels have another size than this CPU's."""
    name, _, layout = origin.partition(" ")
    if name != ORIGIN:
        raise PlanInvalidError([f"module of origin {origin!r}: a CPU plan has modules of {ORIGIN} only"])
    if layout and layout != f"nchwc{nchwc_block_size()}":
        raise DeviceMismatchError(
            f"the plan was made for a CPU with convolution layout {layout}, this one has nchwc{nchwc_block_size()}: "
            f"compile it again here"
        )
