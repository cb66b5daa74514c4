"""The tables that the command line prints, made with rich from plain values."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nimblec.cli.console import printable
from nimblec.cli.measure import Measurement
from nimblec.inspect.inspection import Json
from nimblec.plan.interface import shape_text
from nimblert.stages import Stage
from nimblert.telemetry import CommandTime

ROWS = 20
"""Rows of a table before "and N more"."""

SMALL = 16
"""Outputs of up to this many elements are printed."""


PIPE_WIDTH = 160
"""Width of tables that are not printed to a terminal."""


class SafeConsole(Console):
    """A console that escapes control codes in text, so that only its own reach the terminal."""

    def __init__(self, *, stderr: bool = False, record: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=False, record=record)
        if not self.is_terminal:
            self.width = PIPE_WIDTH

    def on_broken_pipe(self) -> NoReturn:
        """Raise, where rich would exit."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Render the escaped text, so that columns are measured as they print."""
        return super().render_str(printable(text, keep="\n"), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render text with the characters that do not print escaped."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, keep="\n"), style, control)


def nbytes_text(nbytes: int) -> str:
    """Return a size in decimal units: 640 B, 66.5 kB, 1.2 GB."""
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def seconds_text(seconds: float) -> str:
    """Return a duration with three digits: 1.25 s, 4.31 ms, 66.3 us."""
    scales = (("s", 1), ("ms", 1e3), ("us", 1e6))
    unit, scale = next((pair for pair in scales if seconds * pair[1] >= 1), scales[-1])
    value = seconds * scale
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f} {unit}"


def table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table; the columns named in ``right`` are aligned to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def compiled(facts: Json) -> Table:
    """Return the result of a compilation, and where its time went: what ``compile --json`` prints."""
    size = facts["sizes"]
    made = table("", "plan", "value", right=("value",))
    made.show_header = False
    made.add_row("kernels", f"{facts['kernels']} ({facts['launches']} launches)")
    made.add_row("modules", f"{facts['modules']} ({nbytes_text(size['code'])})")
    made.add_row("weights", nbytes_text(size["weights"]))
    made.add_row("arena", nbytes_text(size["arena"]))
    made.add_row("file", nbytes_text(size["file"]), end_section=True)
    for stage in facts["stages"]:
        made.add_row(stage["name"], seconds_text(stage["seconds"]))
    made.add_row("all stages", seconds_text(facts["seconds"]))
    return made


def inspected(facts: Json) -> list[Table]:
    """Return the tables of `nimblec inspect`, from `inspection.describe`."""
    return [
        *(_tensors(program) for program in facts["programs"]),
        *_profiles(facts),
        _sizes(facts),
        _origin(facts),
        *(made for program in facts["programs"] for made in _program(program)),
        _modules(facts),
        _kernels(facts),
        _memory_map(facts),
        _weights(facts),
        *([_state(facts)] if facts["state"] else []),
    ]


def _origin(facts: Json) -> Table:
    made = table("Plan", "", "")
    made.show_header = False
    made.add_row("target", facts["target"])
    name, *others = (f"{key.replace('_', ' ')} {value}" for key, value in facts["device"].items())
    made.add_row("made on", ", ".join((name.removeprefix("name "), *others)))
    made.add_row("made by", facts["producer"])
    made.add_row("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    if facts["is_stripped"]:
        made.add_row("weights", "in another file, see --strip-weights of nimblec compile")
    if refits := facts["refits"]:
        replaceable = sum(len(refit["weights"]) for refit in refits)
        made.add_row("new weights", f"{replaceable} can be replaced, by {sum(r['commands'] for r in refits)} commands")
    return made


def _profiles(facts: Json) -> list[Table]:
    """Return the sizes of named dimensions, if there are any."""
    made = table("Dimensions", "entry", "dimension", "sizes", "other sizes")
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for program in facts["programs"]:
        for name, size in program["profile"].items():
            found.setdefault((program["entry"], name), []).append((size, program["fits"][name]))
    for (entry, name), uses in found.items():
        fits = [fit for fit in _OTHER_SIZES if fit in {fit for _, fit in uses}]
        made.add_row(entry, name, ", ".join(map(str, sorted({n for n, _ in uses}))), _OTHER_SIZES[fits[0]])
    return [made] if found else []


_OTHER_SIZES = {"exact": "refused", "padded": "padded", "split": "padded, larger ones split"}
"""The treatment of calls of other sizes, by the fit of the program that serves least."""


def _sizes(facts: Json) -> Table:
    size = facts["sizes"]
    made = table("Sizes", "what", "bytes", "", right=("bytes", ""))
    for key, value in size.items():
        made.add_row(key, f"{value:,}", nbytes_text(value))
    return made


def _program(program: Json) -> list[Table]:
    made = [_commands(program)]
    return [*made, _schedule(program), _candidates(program)] if program["schedule"] else made


def _tensors(program: Json) -> Table:
    made = table(f"Program {program['name']!r}: inputs and outputs", "", "name", "type", "place")
    for role in ("inputs", "outputs"):
        for tensor in program[role]:
            shape = shape_text(tensor["dtype"], tensor["shape"]) + " at most" * tensor.get("is_bound", False)
            made.add_row(role[:-1], tensor["name"], shape, tensor["place"])
    return made


def _commands(program: Json) -> Table:
    counts = program["commands"]
    columns = ("ops", "streams", "events", *counts, "golden")
    made = table(f"Program {program['name']!r}: commands", *columns, right=columns)
    golden = program["golden"]
    made.add_row(
        *(str(program[key]) for key in ("ops", "streams", "events")),
        *map(str, counts.values()),
        "none" if golden is None else f"seed {golden['seed']}, tolerance {golden['tolerance']:g}",
    )
    return made


def _schedule(program: Json) -> Table:
    schedule = program["schedule"]
    arena, bound = schedule["arena"], schedule["arena_lower_bound"]
    made = table(f"Program {program['name']!r}: schedule", "", "", right=("",))
    made.show_header = False
    made.add_row("policy", schedule["policy"], "")
    made.add_row("streams", str(schedule["streams"]), "")
    fewest = f"waits of one stream for another; full concurrency takes {schedule['fewest_syncs']}"
    made.add_row("syncs", str(schedule["syncs"]), fewest)
    made.add_row("antichain", str(len(schedule["antichain"])), "commands, any two of which may run at the same time")
    above = f", {arena / bound - 1:.1%} above the lower bound" if bound else ""
    made.add_row("arena", f"{arena:,}", f"bytes{above}")
    made.add_row("lower bound", f"{bound:,}", "bytes that are live at the same time in this schedule")
    return made


def _candidates(program: Json) -> Table:
    schedule = program["schedule"]
    columns = ("streams", "syncs", "arena bytes", "time")
    made = table(f"Program {program['name']!r}: schedules tried", "policy", *columns, "", right=columns)
    for candidate in schedule["candidates"]:
        time = candidate["duration_ns"]
        made.add_row(
            candidate["policy"],
            str(candidate["streams"]),
            str(candidate["syncs"]),
            f"{candidate['arena']:,}",
            seconds_text(time / 1e9) if time else "not measured",
            "kept" if candidate["policy"] == schedule["policy"] else "",
        )
    return made


def _kernels(facts: Json) -> Table:
    kernels: Counter[tuple[str, str]] = Counter()
    launches: Counter[tuple[str, str]] = Counter()
    for kernel in facts["kernels"]:
        kernels[kernel["origin"], kernel["symbol"]] += 1
        launches[kernel["origin"], kernel["symbol"]] += kernel["launches"]
    made = table("Kernels", "origin", "symbol", "kernels", "launches", right=("kernels", "launches"))
    rows = [(*key, str(kernels[key]), str(count)) for key, count in launches.most_common()]
    return capped(made, rows)


def _modules(facts: Json) -> Table:
    made = table("Modules", "origin", "modules", "bytes", right=("modules", "bytes"))
    for origin, module in facts["modules"].items():
        made.add_row(origin, str(module["count"]), f"{module['nbytes']:,}")
    return made


def _memory_map(facts: Json) -> Table:
    made = table("Memory map", "region", "bytes", "holds", right=("bytes",))
    for region, nbytes in facts["regions"].items():
        made.add_row(region, f"{nbytes:,}", f"{len(facts[region])} tensors")
    for program in facts["programs"]:
        regions = program["regions"]
        ranges = len(program["arena_map"])
        made.add_row("arena", f"{regions['arena']:,}", f"{ranges} ranges of program {program['name']!r}")
        for role in ("inputs", "outputs"):
            for index, nbytes in enumerate(regions[role]):
                made.add_row(f"{role[:-1]}[{index}]", f"{nbytes:,}", "")
    return made


def _weights(facts: Json) -> Table:
    made = table("Weights", "name", "type", "offset", "bytes", right=("offset", "bytes"))
    rows = [
        (row["name"], shape_text(row["dtype"], row["shape"]), f"{row['offset']:,}", f"{row['nbytes']:,}")
        for row in facts["weights"]
    ]
    return capped(made, rows)


def _state(facts: Json) -> Table:
    made = table("State", "name", "type", "bytes", "a run", right=("bytes",))
    rows = [
        (
            row["name"] or "(scratch memory of kernels)",
            shape_text(row["dtype"], row["shape"]),
            f"{row['nbytes']:,}",
            _uses(row["uses"]),
        )
        for row in facts["state"]
    ]
    return capped(made, rows)


def _uses(uses: dict[str, str]) -> str:
    """Return the effect of a run on a tensor of the state; by program where they differ."""
    said = {"in place": "writes it in place", "copied": "makes it anew and copies it", "read": "reads it"}
    if len(set(uses.values())) == 1:
        return said[next(iter(uses.values()))]
    return ", ".join(f"{program}: {said[use]}" for program, use in uses.items())


def capped(made: Table, rows: Sequence[tuple[str | Text, ...]], *, rest: str = "--json lists all") -> Table:
    """Return the table with its first rows and a line about the others: ``rest`` says where to find them."""
    for row in rows[:ROWS]:
        made.add_row(*row)
    if len(rows) > ROWS:
        made.caption, made.caption_justify = f"... and {len(rows) - ROWS} more ({rest})", "left"
    return made


def outputs(arrays: dict[str, np.ndarray], digests: dict[str, bytes]) -> Table:
    """Return the outputs of a run: types, the first 6 bytes of each digest, and the values of small ones."""
    made = table("", "output", "type", "sha256", "values")
    for name, array in arrays.items():
        made.add_row(name, shape_text(array.dtype.name, array.shape), digests[name][:6].hex(), _values(array))
    return made


def _values(array: np.ndarray) -> str:
    if array.size > SMALL:
        return f"({array.size:,} elements)"
    return np.array2string(array, precision=4, suppress_small=True, separator=" ", max_line_width=60)


def latency_text(latencies: Sequence[float]) -> str:
    """Format the median, 5th and 95th percentile of the seconds of single runs."""
    low, median, high = (seconds_text(float(q)) for q in np.percentile(latencies, [5, 50, 95]))
    return f"latency of {len(latencies)} runs: median {median}, p5 {low}, p95 {high}"


def stages(kept: Sequence[Stage]) -> Table:
    """Return a table of the stages of a load and when they began; those whose times overlap ran side by side."""
    made = table("where the time went, in ms", "stage", "begin", "end", "time", right=("begin", "end", "time"))
    first = min(stage.begin for stage in kept)
    for stage in sorted(kept, key=lambda stage: (stage.begin, -stage.end)):
        begin, end = ((moment - first) * 1e3 for moment in (stage.begin, stage.end))
        made.add_row(stage.name, f"{begin:.1f}", f"{end:.1f}", f"{end - begin:.1f}")
    return made


def measured(measurement: Measurement) -> Table:
    """Return a table of the throughput and the percentiles of the latencies."""
    made = table("", "measured", "value", right=("value",))
    made.show_header = False
    made.add_row("runs", f"{measurement.latencies.size:,} in {seconds_text(measurement.seconds)}")
    made.add_row("throughput", f"{measurement.throughput:,.1f} runs/s", end_section=True)
    for name, seconds in measurement.summary().items():
        made.add_row(name, seconds_text(seconds))
    return made


def profiled(commands: Sequence[CommandTime]) -> Table:
    """Return the slowest commands, each run alone; ``commands`` are all of them, the slowest first."""
    total = sum(command.nanoseconds for command in commands)
    title = f"Commands, each run alone: {len(commands)}, {seconds_text(total / 1e9)} in all"
    made = table(
        title,
        "command",
        "kind",
        "op",
        "source",
        "stream",
        "time",
        "share",
        right=("command", "stream", "time", "share"),
    )
    rows = [
        (
            str(command.command),
            command.kind,
            command.op,
            command.source,
            str(command.stream),
            seconds_text(command.nanoseconds / 1e9),
            f"{command.nanoseconds / max(total, 1):.1%}",
        )
        for command in commands
    ]
    return capped(made, rows)
