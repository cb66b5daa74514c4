"""When each command of a program would run, and which commands determine how long a run takes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nimblert.cuda.graph import Edge, edges
from nimblert.plan import Command, Crop, Launch, Memcpy, Memset, Program, Record, Switch, Wait, While, Work

UNIT_NS = 1000
"""The duration of every command if none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A launch, copy or fill in time. ``command`` indexes `Program.commands`."""

    command: int
    work: Work
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """The time that it runs."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Work of one stream that waits for work of another, both as indices of `Timeline.spans`."""

    event: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of a program in issue order, the events between them, and its critical path.

    ``critical_path`` are indices of ``spans``, first to last: each starts when the one before it
    ends, and the last one ends the run. ``unmeasured`` spans have no duration in the plan.
    """

    spans: tuple[Span, ...]
    handovers: tuple[Handover, ...]
    critical_path: tuple[int, ...]
    unmeasured: int

    @property
    def duration_ns(self) -> int:
        """From the start of the first span to the end of the last one."""
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def work_ns(self) -> int:
        """The durations of all spans together."""
        return sum(span.duration_ns for span in self.spans)

    @property
    def measured(self) -> bool:
        """Whether durations were measured; if not, every command counts `UNIT_NS`."""
        return self.unmeasured < len(self.spans)


def timeline(program: Program) -> Timeline:
    """Simulate the streams and events of a verified program with the durations of its commands.

    Work starts when all that it depends on has ended (`nimblert.cuda.graph`). Streams do not slow each
    other down (true of small kernels, an underestimate for those that fill the machine), and events
    and launches cost nothing. A command that was not measured takes as long as the shortest that was.
    """
    works = list(program.work)
    measured = [work.duration_ns for _, work in works if work.duration_ns]
    unit = min(measured, default=UNIT_NS)
    dependencies = edges(program.commands)
    spans: list[Span] = []
    for (place, work), before in zip(works, dependencies, strict=True):
        start = max((spans[edge.source].end_ns for edge in before), default=0)
        end = start + (work.duration_ns or unit)
        spans.append(Span(command=place, work=work, start_ns=start, end_ns=end))
    return Timeline(
        spans=tuple(spans),
        handovers=tuple(_handovers(program.commands)),
        critical_path=_critical_path(spans, dependencies),
        unmeasured=len(works) - len(measured),
    )


def kind(program: Program, work: Work) -> str:
    """Return the kind of work: ``copy``, ``fill``, or its operator (``convolution``, ``Conv``)."""
    match work:
        case Memcpy():
            return "copy"
        case Memset():
            return "fill"
        case Crop():
            return "crop"
        case Launch() | While() | Switch():
            name = program.ops[work.op].name
            parts = name.split(".")
            # torch: namespace, operator, overload; ONNX: the domain, if any, and the operator
            return parts[1] if parts[0] in {"aten", "prims"} and len(parts) > 1 else parts[-1]


def visible(text: str) -> str:
    """Replace the characters that do not print by "?": a name in a plan may come from anywhere."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _critical_path(spans: Sequence[Span], dependencies: Sequence[Sequence[Edge]]) -> tuple[int, ...]:
    """Follow the latest of what each span waits for, back from the span that ends last."""
    if not spans:
        return ()
    path = [max(range(len(spans)), key=lambda i: spans[i].end_ns)]
    while before := dependencies[path[-1]]:
        path.append(max((edge.source for edge in before), key=lambda i: spans[i].end_ns))
    return tuple(reversed(path))


def _handovers(commands: Iterable[Command]) -> Iterator[Handover]:
    """Yield each wait with the work that its event stands for and the work that it holds up."""
    # For each stream, the work that an event would mark now.
    last: dict[int, frozenset[int]] = {}
    marked: dict[int, frozenset[int]] = {}
    # For each stream, the (event, source) that its next work waits for.
    pending: dict[int, list[tuple[int, int]]] = {}
    count = 0
    for command in commands:
        stream = command.stream
        match command:
            case Record(event=event):
                marked[event] = last.get(stream, frozenset()) | {source for _, source in pending.get(stream, ())}
            case Wait(event=event):
                pending.setdefault(stream, []).extend((event, source) for source in sorted(marked[event]))
            case _:
                for event, source in pending.pop(stream, ()):
                    yield Handover(event=event, source=source, target=count)
                last[stream] = frozenset({count})
                count += 1
