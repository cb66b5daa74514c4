"""The intermediate representation: tasks that read and write byte ranges of buffers.

Both targets make a `Graph`; scheduling, memory layout and lowering know nothing else.
"""

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from nimblert.plan import Dim3, Kernel, Module, Profile, ScheduleRecord

LIBRARY_MEMORY = "memory of a library"
"""Part of the names of state that is not the model's: a library keeps it on the GPU between its calls."""

BUSY = (
    "other work kept this machine busy while schedules were timed: the model's order is kept (or the first that fits "
    "--memory-limit), and neither disturbed times nor the plan are cached; compile again on a quiet machine, or give "
    "--streams"
)
"""The note on a choice by disturbed times."""


class BufferKind(enum.Enum):
    """The purpose of a buffer, which determines its region in the plan."""

    CONSTANT = "constant"
    INPUT = "input"
    OUTPUT = "output"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One allocation of ``nbytes`` bytes.

    ``data`` holds the (initial) contents of a constant or state buffer, None elsewhere. ``dtype``
    and ``shape`` only describe it. Contents of a workspace do not outlive the op that uses it.
    A state without a name is scratch memory of kernels, which a run leaves as it found it.
    Constants and states of several graphs that have the same ``storage`` lie in the same memory; 0: shared with
    no other graph. A constant that ``is_replaceable`` has a unique name, and is stored apart from others of equal
    contents.
    """

    kind: BufferKind
    nbytes: int
    name: str = ""
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    alignment: int = 256
    data: memoryview | None = field(default=None, repr=False, compare=False)
    storage: int = field(default=0, compare=False)
    is_replaceable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """``nbytes`` bytes of ``buffer`` from ``offset``."""

    buffer: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The address of byte ``offset`` of ``buffer`` stands at ``param_offset`` of the parameters."""

    param_offset: int
    buffer: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """A kernel launch; the fields are those of `nimblert.plan.Launch`."""

    kernel: int
    params: bytes
    references: tuple[Reference, ...]
    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (1, 1, 1)
    cluster: Dim3 = (0, 0, 0)
    dynamic_smem_nbytes: int = 0
    cooperative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWork:
    """A device to device copy of as many bytes as ``dst`` and ``src`` have."""

    dst: Access
    src: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class FillWork:
    """``dst`` filled with elements of ``element_nbytes`` bytes, each ``value``."""

    dst: Access
    value: int
    element_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CropWork:
    """Output ``output`` of the graph cut to ``sizes``: int64 numbers, one for each of its dimensions."""

    output: int
    sizes: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCall:
    """A run of ``Graph.bodies[body]``.

    ``buffers`` holds, for each buffer of kind INPUT or OUTPUT of the body's graph in order, that of the graph around.
    ``scratch`` is the buffer for the body's arena, -1 before the body is scheduled.
    """

    body: int
    buffers: tuple[int, ...]
    scratch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWork:
    """Runs of a body while the bool ``condition`` is true, at most ``limit``."""

    condition: Access
    call: BodyCall
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchWork:
    """A run of one of several bodies: the byte ``index`` is its place among ``calls``."""

    index: Access
    calls: tuple[BodyCall, ...]


Work: TypeAlias = KernelWork | CopyWork | FillWork | CropWork | LoopWork | SwitchWork


def calls_of(work: Work) -> tuple[BodyCall, ...]:
    """Return the runs of bodies that a task may make."""
    match work:
        case LoopWork():
            return (work.call,)
        case SwitchWork():
            return work.calls
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kernel launch, copy, fill or crop, a loop or a branch.

    The accesses of a loop or branch are those of its bodies outside of their own memory. ``programmatic_after`` is the
    task (a lower index) from which this one was captured with a programmatic edge: it may start before the preceding
    launch has ended, and waits for it itself. None if it may not. ``joined`` is the number of tasks that this one was
    joined of, whose ops follow its own.
    """

    op: int
    work: Work
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    programmatic_after: int | None = None
    duration_ns: int = 0
    joined: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """The operator a task came from.

    An ``opaque`` op launched kernels whose accesses are not known exactly: its tasks keep their
    order.
    """

    name: str
    source: str
    opaque: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A graph input or output: a strided view of a buffer; ``strides`` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    buffer: int
    offset: int = 0
    sample_range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model as tasks in the order in which they were captured, a valid serial order.

    ``weights`` name those weights of the model that fill a buffer unchanged, each with its buffer; ``folded``
    names those from which constants were computed.
    """

    modules: tuple[Module, ...]
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    tasks: tuple[Task, ...]
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    weights: tuple[tuple[str, int], ...] = ()
    folded: frozenset[str] = frozenset()
    bodies: tuple["Body", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The stream of each task, the order in which tasks are issued, and the waits between streams.

    ``order`` lists every task once, ``streams[task]`` its stream. Tasks of one stream run in issue
    order. ``waits`` are the pairs (before, after) of tasks of different streams that an event
    orders; ``before`` is issued first.
    """

    order: tuple[int, ...]
    streams: tuple[int, ...]
    stream_count: int
    waits: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``offsets[buffer]`` in its region; the sizes of the regions.

    Inputs and outputs are regions of their own, so their offset is 0.
    """

    offsets: tuple[int, ...]
    arena_nbytes: int
    weights_nbytes: int
    state_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The graph of a loop's or branch's body, in a schedule and memory layout once it has one.

    Its buffers of kind INPUT and OUTPUT are memory of the graph around it; it has no state.
    """

    graph: Graph
    schedule: Schedule | None = None
    memory: Layout | None = None

    @property
    def outer(self) -> tuple[int, ...]:
        """The buffers that are memory of the graph around it."""
        kinds = (BufferKind.INPUT, BufferKind.OUTPUT)
        return tuple(index for index, buffer in enumerate(self.graph.buffers) if buffer.kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A graph with its schedule and memory layout, for the program of an entry and profile.

    ``record`` says why, ``notes`` what the user is to know of the choice.
    """

    graph: Graph
    schedule: Schedule
    memory: Layout
    record: ScheduleRecord | None = None
    entry: str = "main"
    profile: Profile = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The program's name: "main", or "main[batch=4]"."""
        return program_name(self.entry, self.profile)


ProgramKey: TypeAlias = tuple[str, Profile]
"""Identifies a program of a plan: its entry and profile."""


def program_name(entry: str, profile: Profile) -> str:
    """Return the name of the program of an entry for a profile."""
    sizes = ",".join(f"{name}={size}" for name, size in profile)
    return f"{entry}[{sizes}]" if sizes else entry
