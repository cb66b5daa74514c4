"""A program's streams as a picture in the terminal: a row per stream, time to the right.

Letters and signs carry the meaning, colours only repeat it: it reads the same in a pipe or a log.
"""

import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from nimblec.cli.report import capped, seconds_text, table
from nimblec.inspect.timeline import UNIT_NS, Span, Timeline, kind, timeline, visible
from nimblert.plan import Program

IDLE = "."
OTHER = "#"
"""The letter of all further kinds of work."""
CRITICAL, RECORDS, WAITS, BOTH = "=><x"

_HUES = ("blue", "green", "yellow", "magenta", "cyan", "red")
_COLOURS = (*_HUES, *(f"bright_{hue}" for hue in _HUES))
_LEAST_COLUMNS = 10
_TICK_COLUMNS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class _Canvas:
    """A time scale: ``columns`` columns for ``duration_ns``, right of ``margin`` columns of labels."""

    columns: int
    duration_ns: int
    margin: int

    def overlaps(self, span: Span) -> Iterator[tuple[int, int]]:
        """Yield each column that the span touches, with how much of it, in parts of ``duration_ns``."""
        start, end = span.start_ns * self.columns, span.end_ns * self.columns
        for column in range(start // self.duration_ns, -(-end // self.duration_ns)):
            low = column * self.duration_ns
            yield column, min(end, low + self.duration_ns) - max(start, low)

    def first(self, span: Span) -> int:
        """Return the column in which the span starts."""
        return span.start_ns * self.columns // self.duration_ns

    def last(self, span: Span) -> int:
        """Return the column in which the span ends."""
        return -(-span.end_ns * self.columns // self.duration_ns) - 1


def picture(program: Program, *, width: int) -> list[RenderableType]:
    """Draw the simulated run of a program in lines of at most ``width`` columns, 30 at least."""
    times = timeline(program)
    if not times.spans:
        return [Text(f"Program {visible(program.name)!r}: no work")]
    margin = len(f"stream {program.stream_count - 1} ")
    columns = max(_LEAST_COLUMNS, width - margin - len(" 100%"))
    canvas = _Canvas(columns=columns, duration_ns=times.duration_ns, margin=margin)
    letters = _letters(program, times)
    made: list[RenderableType] = [*_heading(program, times), _axis(canvas, times)]
    for stream in range(program.stream_count):
        made.append(_row(program, times, canvas, letters, stream))
        made.append(_marks(times, canvas, stream))
    return [*made, _signs(times, canvas), _legend(program, times, letters), *_events(program, times)]


def _time(nanoseconds: float, times: Timeline) -> str:
    """Return a time, or a number of commands where no durations were measured."""
    return seconds_text(nanoseconds / 1e9) if times.measured else f"{round(nanoseconds / UNIT_NS, 2):g}"


def _heading(program: Program, times: Timeline) -> Iterator[Text]:
    yield Text(f"Program {visible(program.name)!r}: timeline", style="bold")
    at_once = times.work_ns / times.duration_ns
    if not times.measured:
        yield Text(
            f"No durations in the plan, so that every command counts the same: {len(times.spans)} launches, copies "
            f"and fills in {_time(times.duration_ns, times)} steps, {at_once:.2f} commands at a time."
        )
        return
    guessed = f" ({times.unmeasured} commands not measured)" if times.unmeasured else ""
    yield Text(
        f"Simulated from the durations of single commands{guessed}: {_time(times.work_ns, times)} of work in "
        f"{_time(times.duration_ns, times)}, {at_once:.2f} commands at a time."
    )
    record = program.schedule
    measured = [c.duration_ns for c in record.candidates if c.policy == record.policy] if record else []
    if any(measured):
        yield Text(f"Measured when the plan was made: {seconds_text(max(measured) / 1e9)}.")


def _letters(program: Program, times: Timeline) -> dict[str, str]:
    """Return a lower-case letter for each kind of work, those that take most time first, `OTHER` for the last."""
    spent: Counter[str] = Counter()
    for span in times.spans:
        spent[kind(program, span.work)] += span.duration_ns
    free = dict.fromkeys(string.ascii_lowercase)
    letters: dict[str, str] = {}
    for name, _ in sorted(spent.items(), key=lambda item: (-item[1], item[0])):
        wanted = [letter for letter in name.lower() if letter in free] or list(free)
        letters[name] = wanted[0] if len(letters) < len(_COLOURS) else OTHER
        free.pop(letters[name], None)
    return letters


def _style(letter: str, letters: Mapping[str, str]) -> str:
    places = {taken: place for place, taken in enumerate(letters.values()) if taken != OTHER}
    return f"black on {_COLOURS[places[letter]]}" if letter in places else "black on white"


def _axis(canvas: _Canvas, times: Timeline) -> Text:
    """Return the time axis: the times at their columns, and the total at the end of the line."""
    ticks = max(1, canvas.columns // _TICK_COLUMNS)
    line = ""
    for tick in range(ticks):
        column = tick * canvas.columns // ticks
        line = line.ljust(column) + f"|{_time(tick * times.duration_ns / ticks, times)}"
    return _line(canvas, "", line[: canvas.columns].ljust(canvas.columns), " busy", style="dim")


def _row(program: Program, times: Timeline, canvas: _Canvas, letters: Mapping[str, str], stream: int) -> Text:
    """Return the blocks of a stream: a capital where each starts. A column shows the span that has most of it."""
    # Each column holds its largest share, and the index of that span or -1.
    owners = [(0, -1)] * canvas.columns
    busy = 0
    for index, span in enumerate(times.spans):
        if span.work.stream == stream:
            busy += span.duration_ns
            for column, part in canvas.overlaps(span):
                owners[column] = max(owners[column], (part, index), key=lambda owner: owner[0])
    line = Text(f"stream {stream}".ljust(canvas.margin))
    for index, run in groupby(index for _, index in owners):
        count = len(list(run))
        if index < 0:
            line.append(IDLE * count, style="dim")
        else:
            letter = letters[kind(program, times.spans[index].work)]
            line.append(letter.upper() + letter * (count - 1), style=_style(letter, letters))
    line.append(f" {busy / times.duration_ns:>4.0%}")
    return _unwrapped(line)


def _marks(times: Timeline, canvas: _Canvas, stream: int) -> Text:
    """Mark, below a row, where it is on the critical path, and where it waits or is waited for."""
    marks = [" "] * canvas.columns
    for index in times.critical_path:
        span = times.spans[index]
        if span.work.stream == stream:
            columns = range(canvas.first(span), canvas.last(span) + 1)
            marks[columns.start : columns.stop] = CRITICAL * len(columns)
    sources = {canvas.last(span) for span in _on(stream, times, (h.source for h in times.handovers))}
    targets = {canvas.first(span) for span in _on(stream, times, (h.target for h in times.handovers))}
    for column in sources | targets:
        marks[column] = BOTH if column in sources & targets else RECORDS if column in sources else WAITS
    return _line(canvas, "", "".join(marks), "", style="bold")


def _on(stream: int, times: Timeline, indices: Iterator[int]) -> Iterator[Span]:
    return (times.spans[index] for index in indices if times.spans[index].work.stream == stream)


def _line(canvas: _Canvas, label: str, content: str, end: str, *, style: str) -> Text:
    return _unwrapped(Text(f"{label:<{canvas.margin}}{content}{end}".rstrip(), style=style))


def _unwrapped(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "crop"
    return line


def _signs(times: Timeline, canvas: _Canvas) -> Text:
    step = _time(times.duration_ns / canvas.columns, times)
    return Text(
        f"{CRITICAL} critical path ({len(times.critical_path)} commands)  {RECORDS} another stream waits for this  "
        f"{WAITS} waits for another stream  {BOTH} both  {IDLE} idle; a column is {step}"
        f"{'' if times.measured else ' steps'}, a capital starts a command"
    )


def _legend(program: Program, times: Timeline, letters: Mapping[str, str]) -> Table:
    """Return the meaning of the letters, with the time of each kind of work on all streams together."""
    count: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    critical: Counter[str] = Counter()
    path = frozenset(times.critical_path)
    for index, span in enumerate(times.spans):
        name = kind(program, span.work)
        count[name] += 1
        spent[name] += span.duration_ns
        critical[name] += span.duration_ns if index in path else 0
    columns = ("commands", "time", "share", "on the critical path")
    made = table("", "", "work", *columns, right=columns)
    rows: list[tuple[str | Text, ...]] = [
        (
            Text(letter.upper() + letter, style=_style(letter, letters)),
            visible(name),
            str(count[name]),
            _time(spent[name], times),
            f"{spent[name] / times.work_ns:.1%}",
            f"{critical[name] / times.duration_ns:.1%}",
        )
        for name, letter in letters.items()
    ]
    return capped(made, rows, rest="--chrome-trace has every command")


def _events(program: Program, times: Timeline) -> Sequence[Table]:
    """Return the waits between streams, in their order."""
    if not times.handovers:
        return ()
    made = table("Events", "event", "after", "ends", "before", "starts", right=("event", "ends", "starts"))
    rows = []
    for handover in times.handovers:
        source, target = times.spans[handover.source], times.spans[handover.target]
        ends, starts = _time(source.end_ns, times), _time(target.start_ns, times)
        rows.append((str(handover.event), _named(program, source), ends, _named(program, target), starts))
    return (capped(made, rows, rest="--chrome-trace has all"),)


def _named(program: Program, span: Span) -> str:
    return visible(f"stream {span.work.stream}: {kind(program, span.work)} {program.ops[span.work.op].source}")
