"""The plan: a compiled model as frozen records of integers, strings and bytes.

A plan holds no handles, callables or addresses. Every place in memory is a `Pointer`, a byte offset in a region;
loading turns pointers into addresses.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from numbers import Integral
from os import PathLike
from typing import TypeAlias

from nimblert.errors import InputError


class Region(enum.IntEnum):
    """The memory that a pointer is relative to.

    ARENA holds values of one run, WEIGHTS constants, STATE values that are kept from run to run. INPUT and OUTPUT are
    one region for each index.
    """

    ARENA = 0
    WEIGHTS = 1
    INPUT = 2
    OUTPUT = 3
    STATE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A byte address: ``offset`` bytes from the start of a region.

    ``index`` is the number of the input or output region, 0 elsewhere. The offset of a relocation
    may lie outside its region: some kernels take the base address minus a padding.
    """

    region: Region
    index: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """The 8 bytes at ``param_offset`` of a parameter buffer become the address of ``pointer``."""

    param_offset: int
    pointer: Pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A byte range that a command reads or writes."""

    pointer: Pointer
    nbytes: int


Dim3: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Run a kernel.

    ``params`` is the parameter buffer, zero where a relocation goes. On the CPU target it is an array of pointers, one
    relocation each, in the order of the kernel's parameters. ``cluster`` is (0, 0, 0) for a launch without clusters.
    ``programmatic``: the edge from the previous launch on its stream is a programmatic one (the kernel may start before
    that launch has ended, and waits for it itself). ``op`` indexes `Program.ops`; ``duration_ns`` is the time measured
    at compilation, 0 if it was not.
    """

    stream: int
    op: int
    kernel: int
    params: bytes
    relocations: tuple[Relocation, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (1, 1, 1)
    cluster: Dim3 = (0, 0, 0)
    dynamic_smem_nbytes: int = 0
    cooperative: bool = False
    programmatic: bool = False
    duration_ns: int = 0

    def __repr__(self) -> str:
        counts = f"{len(self.reads)} reads, {len(self.writes)} writes"
        return f"Launch(kernel={self.kernel}, stream={self.stream}, op={self.op}, grid={self.grid}, {counts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memcpy:
    """Copy ``nbytes`` bytes from ``src`` to ``dst``."""

    stream: int
    op: int
    dst: Pointer
    src: Pointer
    nbytes: int
    duration_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memset:
    """Write ``count`` elements of ``element_nbytes`` (1, 2 or 4) bytes, each ``value``."""

    stream: int
    op: int
    dst: Pointer
    value: int
    element_nbytes: int
    count: int
    duration_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Record ``event`` after the work issued so far on ``stream``; each event is recorded once."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Have later commands on ``stream`` wait for the work that ``event`` was recorded after."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class While:
    """Run the program ``body`` of `Plan.bodies` again and again, while the bool at ``condition`` is true before it.

    A run that needs the body more than ``limit`` times fails. ``reads`` holds what is read of memory written before
    this command, ``writes`` all that the body may write.
    """

    stream: int
    op: int
    condition: Pointer
    body: int
    limit: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    duration_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Run one of the programs ``bodies`` of `Plan.bodies`: the byte at ``index`` is its place in the list.

    A byte beyond the list stands for its end, so that a bool chooses between two. ``reads`` and ``writes`` are those of
    all bodies, as in `While`.
    """

    stream: int
    op: int
    index: Pointer
    bodies: tuple[int, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    duration_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop:
    """Cut output ``output`` of the program to the size that this run gave it; the rest of its shape is padding.

    ``sizes`` is the place of ``rank`` int64 numbers, one for each dimension: how much of it this run filled.
    """

    stream: int
    op: int
    output: int
    sizes: Pointer
    rank: int
    duration_ns: int = 0


Work: TypeAlias = Launch | Memcpy | Memset | While | Switch | Crop
Command: TypeAlias = Work | Record | Wait


class Target(enum.IntEnum):
    """Where the kernels of a plan run; a FAT plan has none, but parts, each of which is a plan for another machine."""

    CUDA = 0
    CPU = 1
    FAT = 2


ITEM_NBYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Every dtype a plan may name, by numpy's (and ml_dtypes') name, with its bytes per element."""

MAX_RANK = 64
"""The most dimensions of a tensor."""


def dense_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a contiguous tensor; 0 for an unknown dtype or too many dimensions."""
    return prod(shape) * ITEM_NBYTES.get(dtype, 0) if len(shape) <= MAX_RANK else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An input or output of a program. ``strides`` are in elements.

    ``sample_range`` bounds the integers (both ends included) that may be drawn for this input; None where any value of
    the dtype will do. ``mask`` marks an input that is 0 where the others are padded, and so masks the padding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pointer: Pointer
    sample_range: tuple[int, int] | None = None
    mask: bool = False

    def __repr__(self) -> str:
        return f"Tensor({_brief(self)})"

    @property
    def span_nbytes(self) -> int:
        """Bytes from the start of the first element to the end of the last; 0 for an empty tensor."""
        if prod(self.shape) == 0:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * ITEM_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """Code: one cubin (CUDA target) or one ONNX model of a few nodes (CPU target).

    ``origin`` names the library that the code is from ("aten", "cudnn", "cublas", "triton" ...).
    """

    origin: str
    code: memoryview = field(repr=False)


class ParameterKind(enum.IntEnum):
    """How a kernel takes a parameter.

    VALUE: bytes of the parameter buffer (every CUDA parameter). The others are the CPU target's,
    whose parameters are all pointers: INPUT and OUTPUT are bound at each run, INITIALIZER once.
    """

    VALUE = 0
    INPUT = 1
    OUTPUT = 2
    INITIALIZER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a kernel: ``nbytes`` bytes at ``offset`` of the parameter buffer.

    ``name``, ``dtype`` and ``shape`` are empty on the CUDA target.
    """

    offset: int
    nbytes: int
    kind: ParameterKind = ParameterKind.VALUE
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An entry point of a module, with the function attributes to set before it is launched.

    ``symbol`` is the mangled name in the cubin, or the ONNX operator on the CPU target.
    """

    module: int
    symbol: str
    parameters: tuple[Parameter, ...]
    max_dynamic_smem_nbytes: int = 0
    non_portable_cluster: bool = False

    def __repr__(self) -> str:
        return f"Kernel({self.symbol!r}, module={self.module}, {len(self.parameters)} parameters)"

    @property
    def params_nbytes(self) -> int:
        """Size of the parameter buffer of every launch of this kernel."""
        return max((p.offset + p.nbytes for p in self.parameters), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of the WEIGHTS or STATE region with its (initial) contents.

    A stripped plan has their ``sha256`` instead of ``data``, which `nimblert.plan.external` reads from another file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: memoryview
    sha256: bytes = b""

    def __repr__(self) -> str:
        return f"Weight({_brief(self)}, {self.nbytes:,} bytes at {self.offset:,})"

    @property
    def nbytes(self) -> int:
        """Size of the contents, wherever they are."""
        return dense_nbytes(self.dtype, self.shape) if self.sha256 else self.data.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """The operator that commands were made of.

    ``name``: "aten.convolution.default" or "Conv". ``source``: the module path or ONNX node name,
    and of a training step the phase ("backward of model.conv"); schema/README.md says how.
    """

    name: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenOutput:
    """One output of the golden run.

    ``sha256`` is over the bytes in C order; ``samples`` are values at evenly spaced positions (see
    `nimblert.golden`), for machines that round differently.
    """

    sha256: bytes
    samples: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """A run to repeat: inputs drawn from ``seed``, and the outputs of the framework.

    ``tolerance`` is 0 where outputs must be equal bit for bit, else the largest difference between two runs of the
    framework, relative to the largest magnitude of the output.
    """

    seed: int
    tolerance: float
    outputs: tuple[GoldenOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule that the compiler tried; ``sync_count`` is its number of waits of one stream for another.

    ``policy`` is "1", "max", a number of streams, "critical-path-4" ...; ``duration_ns`` is the GPU time of one run, 0
    where it was not measured.
    """

    policy: str
    stream_count: int
    sync_count: int
    arena_nbytes: int
    duration_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """How the schedule was chosen, and the bounds that it is compared with.

    ``antichain`` holds positions of work commands (launches, copies, fills) none of which depends on another: no
    schedule needs more streams than the largest antichain has members. ``arena_lower_bound_nbytes`` is the most bytes
    of buffers that live at the same time under this schedule. ``fewest_sync_count`` is the fewest waits that keep all
    concurrency: the edges of the minimum equivalent graph less those of a maximum matching (Nimble, theorem 2).
    """

    policy: str
    antichain: tuple[int, ...] = field(repr=False)
    arena_lower_bound_nbytes: int
    fewest_sync_count: int
    candidates: tuple[Candidate, ...] = field(repr=False)


Profile: TypeAlias = tuple[tuple[str, int], ...]
"""Sizes of named dimensions."""


class Role(enum.IntEnum):
    """Who runs a program: a caller an ENTRY, a command of another program a BODY, a refit of weights a REFIT."""

    ENTRY = 0
    BODY = 1
    REFIT = 2


class Fit(enum.IntEnum):
    """The sizes that a program serves, in one dimension of its profile.

    EXACT: its own size. PADDED: smaller sizes too, padded at the end. SPLIT: larger sizes too, in parts, since results
    for one element depend on no other.
    """

    EXACT = 0
    PADDED = 1
    SPLIT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Commands for inputs of one shape: one profile of one entry.

    ``input_nbytes[i]`` and ``output_nbytes[i]`` are the sizes of the regions INPUT(i), OUTPUT(i); an input or output
    tensor may lie in any region. ``commands`` are in issue order. ``name`` is unique in the plan. ``entry`` is the name
    that callers use, by default ``name``. ``profile`` holds the sizes of named dimensions that distinguish the programs
    of an entry, and ``fits``, for each of them, the other sizes that the program serves; empty: none.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    input_nbytes: tuple[int, ...]
    output_nbytes: tuple[int, ...]
    arena_nbytes: int
    stream_count: int
    event_count: int
    ops: tuple[Op, ...]
    commands: tuple[Command, ...]
    golden: Golden | None = None
    schedule: ScheduleRecord | None = None
    entry: str = ""
    profile: Profile = ()
    role: Role = Role.ENTRY
    fits: tuple[Fit, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry", self.entry or self.name)

    @property
    def work(self) -> Iterator[tuple[int, Work]]:
        """The launches, copies and fills in issue order, each with the index of its command."""
        return ((i, command) for i, command in enumerate(self.commands) if not isinstance(command, Record | Wait))

    def __repr__(self) -> str:
        inputs, outputs = (listed([_brief(tensor) for tensor in side]) for side in (self.inputs, self.outputs))
        return (
            f"Program({self.name!r}: {inputs} -> {outputs};"
            f" {len(self.commands)} commands on {self.stream_count} streams, arena of {self.arena_nbytes:,} bytes)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The machine that a plan was made on, and so the one that it needs.

    CUDA: the GPU's name, its compute capability, multiprocessors, and the driver's CUDA version
    (13000 for 13.0), below which a plan is refused. CPU: name "cpu", the rest 0.
    """

    name: str
    compute_capability: tuple[int, int] = (0, 0)
    multiprocessor_count: int = 0
    driver_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A plan in a fat plan: the bytes of its whole file, and the target and device in it, by which one is chosen."""

    target: Target
    device: Device
    file: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A compiled model, made by ``producer`` and the libraries in ``versions``.

    ``weights_nbytes`` and ``state_nbytes`` are the sizes of the two regions; ``weights`` and ``state`` are in ascending
    order of offset. All programs share them, and an arena. State without a name is scratch memory of kernels, which a
    run leaves as it found it.

    ``bodies`` are run by the commands While and Switch of programs. Their pointers count from the regions of the entry
    that runs them.

    ``refits`` replace weights. Their inputs are weights as the model has them: one with its pointer in WEIGHTS is
    stored there unchanged, and from the others the commands compute weights of the plan.

    A FAT plan has ``parts``, plans of one interface for several machines, and the weights that several of them have,
    named by the hexadecimal digests by which parts refer to them.

    ``digests`` are SHA-256 digests in a large file, as `nimblert.plan.container.digests` makes them.

    A plan that was read is a view of the bytes of its file; one that was made in memory, by `dataclasses.replace` too,
    has none.
    """

    producer: str
    versions: tuple[tuple[str, str], ...]
    target: Target
    device: Device
    modules: tuple[Module, ...]
    kernels: tuple[Kernel, ...]
    weights_nbytes: int
    weights: tuple[Weight, ...]
    state_nbytes: int
    state: tuple[Weight, ...]
    programs: tuple[Program, ...]
    refits: tuple[Program, ...] = ()
    bodies: tuple[Program, ...] = ()
    parts: tuple[Part, ...] = ()
    digests: bytes = field(default=b"", repr=False, compare=False)
    image: memoryview | None = field(default=None, init=False, repr=False, compare=False)
    """The bytes of the file that the plan was read from; None where it was made or changed in memory."""
    saved_nbytes: int = field(default=0, init=False, repr=False, compare=False)
    """How many bytes its compressed segments take less in that file than in memory."""

    @property
    def entries(self) -> dict[str, tuple[Program, ...]]:
        """The programs of each entry, one for each profile, in the plan's order."""
        found: dict[str, tuple[Program, ...]] = {}
        for program in self.programs:
            if program.role is Role.ENTRY:
                found[program.entry] = (*found.get(program.entry, ()), program)
        return found

    @property
    def is_stripped(self) -> bool:
        """Whether the contents of weights or state are in another file."""
        return any(tensor.sha256 for tensor in (*self.weights, *self.state))

    @property
    def arena_nbytes(self) -> int:
        """Size of the arena: the largest that a program needs."""
        return max((program.arena_nbytes for program in self.programs), default=0)

    def stored(self) -> memoryview:
        """Return the bytes of the file that the plan was read from. Raises InputError where it was made in memory."""
        if self.image is None:
            raise InputError(
                "the plan was made or changed in memory, so no file holds it: nimblec.plan.encoder.write(plan, path)"
                " makes one"
            )
        return self.image

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file that the plan was read from to ``path``, byte for byte, whole or not at all.

        The bytes go to a temporary file beside it, which is renamed once they are on disk. Raises InputError where the
        plan was made or changed in memory, and NimbleError where the file cannot be written; an existing file is
        unchanged then.
        """
        from nimblert.plan.files import replacing  # most processes write no file

        image = self.stored()
        with replacing(path) as file:
            file.write(image)

    def __repr__(self) -> str:
        names = listed([repr(program.name) for program in self.programs])
        return (
            f"Plan({self.target.name.lower()} on {self.device.name!r}, programs {names}:"
            f" {len(self.kernels)} kernels, {len(self.weights)} weights of {self.weights_nbytes:,} bytes,"
            f" made by {self.producer!r})"
        )


_LISTED = 4


def listed(texts: Sequence[str]) -> str:
    """Return the first few of these, as a repr lists them."""
    return ", ".join(texts if len(texts) <= _LISTED else (*texts[:_LISTED], "..."))


def _brief(tensor: Tensor | Weight) -> str:
    return f"{tensor.name!r}: {tensor.dtype} {tensor.shape}"


def is_integer(value: object) -> bool:
    """Return whether it is a number without a fraction, numpy's too; True is not one."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper limits for a plan, checked before anything is allocated: whole numbers, else InputError.

    - ``memory_nbytes``: arena, state, inputs and outputs of all programs together, which is what an executable
      allocates besides the weights; also the values between the nodes of each ONNX model of a CPU plan, which ONNX
      Runtime allocates. ``tensor_nbytes``: one contiguous input, output, parameter, value or weight.
    - ONNX models of a CPU plan: ``model_nbytes`` of each; ``model_fields``, the protobuf fields of all together, each
      of which is a Python object while it is checked.
    - ``unpacked_nbytes``: all compressed segments together.
    - Numbers of ``modules``, ``kernels`` and ``programs``; of ``streams``, ``events`` and ``commands`` of one program;
      of ``refits``, the groups of weights that are replaced together; of ``bodies``, the programs that loops and
      branches run, and of the ``trips`` that a loop may make; of ONNX Runtime's ``sessions`` for the programs that are
      loaded, which is known only when they are opened.
    - The cost of proving that one program is ordered: ``pieces``, the byte ranges that commands access, cut where
      others begin or end; ``clocks``, waits times streams.
    """

    memory_nbytes: int = 64 << 30
    tensor_nbytes: int = 16 << 30
    model_nbytes: int = 64 << 20
    model_fields: int = 1 << 22
    unpacked_nbytes: int = 4 << 30
    modules: int = 1 << 17
    kernels: int = 1 << 17
    programs: int = 1 << 10
    refits: int = 1 << 16
    bodies: int = 1 << 12
    trips: int = 1 << 24
    sessions: int = 1 << 13
    streams: int = 1 << 10
    events: int = 1 << 20
    commands: int = 1 << 20
    pieces: int = 1 << 24
    clocks: int = 1 << 25

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if not is_integer(limit) or limit < 0:
                raise InputError(f"limits: {name} is {limit!r}, expected a whole number of at least 0")


DEFAULT_LIMITS = Limits()
"""The default limits: far above every model that nimblec is tested with."""
