"""The only file that imports onnxruntime: sessions for the kernels of a CPU plan.

onnxruntime is imported when the first CPU plan is loaded, not before.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, partial
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from nimblert.arrays.layouts import numpy_dtype
from nimblert.check import division
from nimblert.check.onnx_model import ELEMENT_TYPES, Graph, Model, Value, read_model, write_model
from nimblert.check.onnx_rules import ORIGIN, declared
from nimblert.check.protobuf import Budget
from nimblert.cpu import sizes, streams
from nimblert.cpu.host_memory import HostMemory, HostWeights
from nimblert.cpu.sizes import Form
from nimblert.cpu.streams import Pool, Threads, Waiting
from nimblert.errors import DeviceMismatchError, PlanFormatError, PlanInvalidError
from nimblert.plan import ITEM_NBYTES, Kernel, Launch, Parameter, ParameterKind, Plan, Pointer, Program, Region
from nimblert.plan.records import DEFAULT_LIMITS, Limits

Inferred: TypeAlias = Mapping[str, tuple[str, tuple[object, ...]]]
"""ONNX Runtime's type and shape of values by name. An unknown size is None, or the name of a dimension."""

LABEL = "node_"
"""The start of the names of nodes in a model of several; the number of the node follows."""

_NO_PACKED_COPIES = ("session.disable_prepacking", "1")
"""For a session that will not compute: kernels make no packed copies of weights."""

_TYPE_NAMES = {dtype: f"tensor({dtype})" for dtype in ELEMENT_TYPES} | {
    "float32": "tensor(float)",
    "float64": "tensor(double)",
}
"""ONNX Runtime's name of each dtype."""

_PLACEHOLDER_FOLDER = str(Path(__file__).resolve().with_name("placeholder"))
"""The folder of the empty file `onnx_rules.EXTERNAL_FILE`. ONNX Runtime refuses a file that is a symbolic link."""

_REORDER_MODEL = bytes.fromhex(
    "08083a560a290a0178120179220c52656f72646572496e7075743a13636f6d2e6d6963726f736f66742e6e6368776312"
    "01675a1b0a017812160a14080112100a0208010a0208040a0208010a02080162090a017912040a02080142040a001011"
    "42170a13636f6d2e6d6963726f736f66742e6e636877631001"
)
"""ReorderInput of a (1, 4, 1, 1) float32 tensor x into y, whose channels are rounded up to a block.
Serialized with the onnx package, which the runtime does not import."""


@cache
def onnxruntime() -> ModuleType:
    """Return the onnxruntime package, with telemetry off unless the user has set ORT_DISABLE_TELEMETRY."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at import, since version 1.29
    try:
        return import_module("onnxruntime")
    except ImportError as exc:
        raise DeviceMismatchError("a CPU plan runs on ONNX Runtime: pip install 'nimblert[cpu]'") from exc


def session_options(pool: Pool | None = None) -> Any:
    """Return SessionOptions for these threads, by default the caller's alone, with nothing logged."""
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
    """Return the exceptions of ONNX Runtime, which have no common class but Exception."""
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
    """Return the channels in a block of ORT's own convolution layout on this machine (8 or 16; 1: none)."""
    try:
        (reordered,) = open_session(_REORDER_MODEL).run(None, {"x": np.zeros((1, 4, 1, 1), np.float32)})
    except runtime_errors():
        return 1
    return int(reordered.shape[1])


def run_options() -> Any:
    """Return RunOptions for one program's launches in one context, by which `nimblert.cpu.streams` ends them all."""
    return onnxruntime().RunOptions()


def open_session(code: bytes, initializers: dict[str, Any] | None = None, options: Any = None) -> Any:
    """Return an InferenceSession that runs the model without optimizing it.

    ``initializers`` are OrtValues by name, used in place; but kernels keep packed copies of some weights (MatMul, Gemm,
    LSTM ...), which are faster and round differently, unless ``options``, from `session_options`, forbid that.
    The files that a model names are looked for in a folder with an empty one only.
    """
    ort = onnxruntime()
    options = options or session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _PLACEHOLDER_FOLDER)
    for name, value in (initializers or {}).items():
        options.add_initializer(name, value)
    return ort.InferenceSession(code, options, providers=["CPUExecutionProvider"])


def ort_value(array: np.ndarray, dtype: str) -> Any:
    """Return an OrtValue over the memory of ``array``, without a copy."""
    return onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(array, ELEMENT_TYPES[dtype])


class _Opened:
    """A session, and the weights that it was opened over, to which it has no references of its own.

    ``checked`` are the models that may run in it: those whose declared values ONNX Runtime has inferred.
    """

    def __init__(self, session: Any, weights: Mapping[str, np.ndarray]) -> None:
        self.session = session
        self.weights = weights
        self.checked: set[bytes] = set()


_opened: weakref.WeakValueDictionary[tuple[object, ...], _Opened] = weakref.WeakValueDictionary()
"""The sessions of this process by everything that they depend on: a plan that is loaded twice shares them."""


def _keep_for_ever() -> None:
    """Free no session in a forked child: the destructor waits for threads that only the parent has."""
    for opened in list(_opened.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))


os.register_at_fork(after_in_child=_keep_for_ever)


class _Code:
    """The code of a kernel, copied and examined once: it is a part of the keys of sessions, which hash it."""

    def __init__(self, kernel: Kernel, code: memoryview) -> None:
        self.code = bytes(code)
        self._kernel = kernel

    @cached_property
    def model(self) -> Model:
        """The parsed model, empty where the bytes are not a model."""
        try:
            return read_model(self.code, Budget(DEFAULT_LIMITS.model_fields))
        except PlanFormatError:
            return Model()

    @cached_property
    def graph(self) -> Graph:
        """The model's graph, or an empty one."""
        return self.model.graph or Graph()

    @cached_property
    def inner(self) -> Mapping[str, tuple[str | None, tuple[int, ...] | None]]:
        """The declared dtypes and shapes of the values between nodes, None where one has none."""
        return {name or "": (dtype, shape) for name, dtype, shape in map(declared, self.graph.value_info)}

    @cached_property
    def division(self) -> tuple[division.Operand, division.Operand] | None:
        """Dividend and divisor that must be checked before each run; None for kernels that need no check."""
        return division.operands(self.graph, self._kernel.parameters) if self.graph.node else None

    @cached_property
    def touched_nbytes(self) -> int:
        """The bytes that the largest node of the kernel reads and writes."""
        nbytes = {p.name: prod(p.shape) * ITEM_NBYTES[p.dtype] for p in self._kernel.parameters}
        nbytes |= {n: prod(shape) * ITEM_NBYTES[dtype] for n, (dtype, shape) in self.inner.items() if dtype and shape}
        nodes = ({*node.input, *node.output} for node in self.graph.node)
        return max((sum(nbytes.get(name, 0) for name in names) for names in nodes), default=0)


_LaunchKey: TypeAlias = tuple[int, tuple[tuple[str, Pointer], ...]]
"""The kernel of a launch, and its weights by the names of their parameters."""


class SessionCache:
    """The sessions of a plan: one for each kernel and its initializers, shared by all launches and contexts.

    Launches of several programs that differ only in sizes share one too (`nimblert.cpu.sizes`).

    Launches are bound in a block of ``with sessions.lock``. ``keeps_memory``: each session keeps the memory of its
    largest run for the next one.
    """

    def __init__(
        self,
        plan: Plan,
        weights: HostWeights,
        threads: Threads | None = None,
        limits: Limits = DEFAULT_LIMITS,
        *,
        keeps_memory: bool = True,
    ) -> None:
        self._plan = plan
        self.weights = weights
        self._threads = streams.checked(threads)
        self._limits = limits
        self._keeps_memory = keeps_memory
        self._is_default = threads is None
        self._codes: dict[int, _Code] = {}
        """By the index of a kernel, which shares its module with no other."""
        self._pools: dict[int, tuple[Program, Mapping[int, Pool]]] = {}
        """By the id of a program: hashing its value would take long."""
        self._forms: dict[_LaunchKey, Form] = {}
        """Those of all launches of the plan, once there is one."""
        self._sessions: dict[tuple[object, ...], _Opened] = {}
        self.lock = threading.RLock()
        for origin in sorted({module.origin for module in plan.modules}):
            check_origin(origin)

    def over(self, weights: HostWeights) -> "SessionCache":
        """Return a cache over other weights, with the sessions that read none of the changed ones."""
        made = copy(self)
        made.weights, made.lock = weights, threading.RLock()
        made._sessions = {  # noqa: SLF001 - of its own class
            key: session
            for key, session in self._sessions.items()
            if all(weights.same(self.weights, pointer.offset) for pointer in key[1:] if isinstance(pointer, Pointer))
        }
        return made

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._sessions)

    def streams_by_thread(self, program: Program) -> list[range]:
        """Return the streams of a program that each thread runs; as many threads as streams unless a number is set."""
        most = None if self._is_default else self._threads[0]
        return streams.streams_by_thread(program.stream_count, most)

    def pools(self, program: Program) -> Mapping[int, Pool]:
        """Return the threads of each launch of a program, by the index of its command.

        Raises PlanInvalidError where its launches and those of the programs before are beyond the limit.
        """
        if id(program) not in self._pools:
            launches = {index: command for index, command in program.work if isinstance(command, Launch)}
            if sum(len(pools) for _, pools in self._pools.values()) + len(launches) > self._limits.sessions:
                limit = f"the limit, {self._limits.sessions}: raise it (nimblert.Limits) if you trust the plan"
                raise PlanInvalidError([f"program {program.name!r}: needs more sessions than {limit}"])
            touched = [self._form(launch).touched_nbytes for launch in launches.values()]
            sessions = [form.touched_nbytes for form in {id(form): form for form in self._forms.values()}.values()]
            pools = streams.pools(touched, program.stream_count, self._threads, sessions)
            self._pools[id(program)] = program, dict(zip(launches, pools, strict=True))
        return self._pools[id(program)][1]

    def bind(self, launch: Launch, pool: Pool, memory: HostMemory, options: Any, where: str) -> "partial[object]":
        """Return a call that runs a launch in ``memory``, under these RunOptions.

        It raises ValueError before a division that would end the process. Raises PlanInvalidError where kernel and
        launch do not fit.
        """
        kernel, code = self._plan.kernels[launch.kernel], self._code(launch.kernel)
        pointers = {relocation.param_offset: relocation.pointer for relocation in launch.relocations}
        if sorted(pointers) != sorted(p.offset for p in kernel.parameters):
            raise PlanInvalidError([f"{where}: its relocations do not match the parameters of kernel {launch.kernel}"])
        form = self._form(launch)
        session = self._session(kernel, code, form, pointers, pool)
        binding = session.io_binding()
        for name, constant in sizes.embedded_inputs(code.graph, form):
            binding.bind_ortvalue_input(name, _copied(constant))
        for parameter in kernel.parameters:
            if parameter.kind is ParameterKind.INITIALIZER and parameter.name not in form.inputs:
                continue
            written = parameter.kind is ParameterKind.OUTPUT
            array = memory.array(pointers[parameter.offset], parameter.dtype, parameter.shape, written=written)
            bind = binding.bind_output if written else binding.bind_input
            bind(parameter.name, "cpu", 0, _element_type(parameter, array), parameter.shape, array.ctypes.data)
        # The extension's own method: 1.6 us a call, where its Python wrapper takes 5 (30 with RunOptions), most of that
        # to look for a WebGPU graph.
        run = partial(session._sess.run_with_iobinding, binding._iobinding, options)  # noqa: SLF001
        if code.division is None:
            return run
        operands = (
            memory.array(pointers[operand.offset], operand.dtype, operand.shape)
            if isinstance(operand, Parameter)
            else operand
            for operand in code.division
        )
        return partial(_checked_division, run, *operands)

    def _code(self, kernel: int) -> _Code:
        if kernel not in self._codes:
            found = self._plan.kernels[kernel]
            self._codes[kernel] = _Code(found, self._plan.modules[found.module].code)
        return self._codes[kernel]

    def _form(self, launch: Launch) -> Form:
        """Return the form of the session of a launch."""
        if not self._forms:
            self._forms |= self._all_forms()
        key = self._key(launch)
        # A launch of a refit is no launch of the plan's programs.
        return self._forms.get(key) or self._own_form(key)

    def _own_form(self, key: _LaunchKey) -> Form:
        code = self._code(key[0])
        return Form(code=code.code, touched_nbytes=code.touched_nbytes)

    def _all_forms(self) -> dict[_LaunchKey, Form]:
        """Return the forms of all launches: one for those that differ only in sizes."""
        programs = (*self._plan.programs, *self._plan.bodies)
        commands = (command for program in programs for _, command in program.work)
        keys = dict.fromkeys(self._key(command) for command in commands if isinstance(command, Launch))
        forms = {key: self._own_form(key) for key in keys}
        alike: dict[Hashable, list[_LaunchKey]] = {}
        if len(self._plan.programs) > 1:
            for kernel, weights in keys:
                common = sizes.common(self._code(kernel).model, dict(weights))
                alike.setdefault(common, []).append((kernel, weights))
        alike.pop(None, None)
        for launches in alike.values():
            if len({kernel for kernel, _ in launches}) > 1:
                form = sizes.general([(self._code(kernel).model, dict(weights)) for kernel, weights in launches])
                touched_nbytes = max(forms[key].touched_nbytes for key in launches)
                forms |= dict.fromkeys(launches, replace(form, touched_nbytes=touched_nbytes))
        return forms

    def _key(self, launch: Launch) -> _LaunchKey:
        pointers = {relocation.param_offset: relocation.pointer for relocation in launch.relocations}
        parameters = self._plan.kernels[launch.kernel].parameters
        initializers = (p for p in parameters if p.kind is ParameterKind.INITIALIZER and p.offset in pointers)
        return launch.kernel, tuple((p.name, pointers[p.offset]) for p in initializers)

    def _session(self, kernel: Kernel, code: _Code, form: Form, pointers: Mapping[int, Pointer], pool: Pool) -> Any:
        """Return the session of a kernel over the weights at these places, by the offset of their parameter."""
        initializers = [p for p in kernel.parameters if p.kind is ParameterKind.INITIALIZER]
        key = (form.code, *(pointers[p.offset] for p in initializers if p.name not in form.inputs), pool)
        opened = self._sessions.get(key)
        if opened is None or code.code not in opened.checked:
            weights = {p.name: self._weight(p, pointers[p.offset]) for p in initializers}
            opened = self._sessions[key] = self._opened(kernel, code, form, weights, pool)
        return opened.session

    def _opened(
        self, kernel: Kernel, code: _Code, form: Form, weights: Mapping[str, np.ndarray], pool: Pool
    ) -> _Opened:
        """Return the session of a kernel: one of this process with the same weights, or a new one."""
        held = {name: array for name, array in weights.items() if name not in form.inputs}
        places = tuple(array.ctypes.data for array in held.values())
        # A child has none of the threads of its parent.
        key = os.getpid(), form.code, places, pool, self._keeps_memory
        final = not any(array.flags.writeable for array in weights.values())
        opened = _opened.get(key) if final else None
        dtypes = {parameter.name: parameter.dtype for parameter in kernel.parameters}
        options = session_options(pool)
        options.enable_cpu_mem_arena = options.enable_mem_pattern = self._keeps_memory
        try:
            values = {name: ort_value(array, dtypes[name]) for name, array in weights.items()}
            if code.inner and (opened is None or code.code not in opened.checked):
                _check_inner(kernel, code, inferred_types(code.model, values))
            if opened is None:
                values = {name: values[name] for name in held}
                opened = _Opened(open_session(form.code, values, options), held)
        except runtime_errors() as exc:
            refusal = f"ONNX Runtime {onnxruntime().__version__} refuses its model: {exc}"
            raise PlanInvalidError([f"kernel {kernel.symbol}: {refusal}"]) from exc
        session = opened.session
        found = {tensor.name: tensor.type for tensor in (*session.get_inputs(), *session.get_outputs())}
        bound = {p.name: _TYPE_NAMES[p.dtype] for p in kernel.parameters if p.name not in held}
        bound |= {name: _TYPE_NAMES[a.dtype.name] for name, a in sizes.embedded_inputs(code.graph, form)}
        if found != bound:
            raise PlanInvalidError([f"kernel {kernel.symbol}: parameters {bound}, its model has {found}"])
        opened.checked.add(code.code)
        return _opened.setdefault(key, opened) if final else opened

    def _weight(self, parameter: Parameter, pointer: Pointer) -> np.ndarray:
        """Return the memory of an initializer, which must lie within one weight."""
        if pointer.region is not Region.WEIGHTS:
            raise PlanInvalidError([f"initializer {parameter.name!r}: in {pointer.region.name}, expected WEIGHTS"])
        weight, start = self.weights.find(pointer.offset)
        nbytes = prod(parameter.shape) * ITEM_NBYTES[parameter.dtype]
        if start + nbytes > weight.nbytes:
            raise PlanInvalidError([f"initializer {parameter.name!r}: its {nbytes} bytes are in no one weight"])
        return weight[start : start + nbytes].view(numpy_dtype(parameter.dtype)).reshape(parameter.shape)


def exposed(model: Model) -> bytes:
    """Return the code of a model with all values that its nodes compute as outputs, without declared types of these."""
    graph = model.graph or Graph()
    made = tuple(Value(name=name) for node in graph.node for name in node.output if name)
    return write_model(replace(model, graph=replace(graph, output=made, value_info=())))


def inferred_types(model: Model, weights: dict[str, Any]) -> Inferred:
    """Return ONNX Runtime's types and shapes of all values that the nodes of a model compute, by name.

    ONNX Runtime infers them without a run, from the model's inputs and constants. ``weights`` are the initializers,
    which are not packed, in a session of its own.
    """
    options = session_options()
    options.add_session_config_entry(*_NO_PACKED_COPIES)
    session = open_session(exposed(model), weights, options)
    return {value.name: (value.type, tuple(value.shape)) for value in session.get_outputs()}


def is_inferred(types: Inferred, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether ONNX Runtime knows that a value has this dtype and shape; never true of a scalar."""
    # ONNX Runtime gives () for a scalar and for an unknown rank alike.
    return bool(shape) and types.get(name) == (_TYPE_NAMES[dtype], shape)


def _check_inner(kernel: Kernel, code: _Code, types: Inferred) -> None:
    """Raise PlanInvalidError unless ONNX Runtime infers what a model of several nodes declares of its values."""
    for name, (dtype, shape) in code.inner.items():
        if dtype is None:
            continue
        kind, _ = types[name]
        if kind != _TYPE_NAMES[dtype] if shape is None else not is_inferred(types, name, dtype, shape):
            found = f"ONNX Runtime infers {types.get(name)}"
            raise PlanInvalidError([f"kernel {kernel.symbol}: value {name!r} is declared {dtype} {shape}, {found}"])


def _copied(array: np.ndarray) -> Any:
    """Return an OrtValue with a copy of an array in memory of its own."""
    value = onnxruntime().OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)
    value.update_inplace(array)
    return value


def _checked_division(run: "partial[object]", dividend: np.ndarray, divisor: np.ndarray) -> object:
    division.check(dividend, divisor)
    return run()


def _element_type(parameter: Parameter, array: np.ndarray) -> Any:
    """Return the element type for IOBinding: numpy's type, or ONNX's number for a dtype that numpy lacks."""
    return array.dtype.type if array.dtype.isbuiltin == 1 else ELEMENT_TYPES[parameter.dtype]


def check_origin(origin: str) -> None:
    """Raise DeviceMismatchError where the plan's blocks of channels have another size than this CPU's."""
    name, _, layout = origin.partition(" ")
    if name != ORIGIN:
        raise PlanInvalidError([f"module of origin {origin!r}: a CPU plan has modules of {ORIGIN} only"])
    if layout and layout != f"nchwc{nchwc_block_size()}":
        raise DeviceMismatchError(
            f"the plan was made for a CPU with convolution layout {layout}, this one has nchwc{nchwc_block_size()}: "
            f"compile it again here"
        )
