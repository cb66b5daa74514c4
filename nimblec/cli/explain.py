"""``nimblec explain``."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import click
from rich.table import Table

from nimblec.cli.command import Command
from nimblec.cli.report import SafeConsole, nbytes_text, seconds_text, table
from nimblec.inspect.inspection import sizes
from nimblec.inspect.plan_difference import measured_run_ns
from nimblec.inspect.timeline import Timeline, kind, timeline
from nimblert.check.verify import read_plan
from nimblert.errors import PlanError
from nimblert.plan import Launch, Plan, Program, Target, pieces

_SLOWEST = 6
"""Commands that are listed, so that all fits on a screen."""

_START_NS = 3000
"""Launches shorter than this on a GPU mostly start and end."""

_ALONE = 1.05
"""Up to so many commands at a time, streams do not matter."""

_WIDEST = 36
"""Characters of a name in the table."""


@click.command("explain", cls=Command, short_help="Say what limits the speed of PLAN.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--program", "name", metavar="NAME", help="The program to explain.  [default: the one with most work]")
def explain_plan(plan: Path, name: str | None) -> None:
    """Say in a screen of words what limits the speed of PLAN, and what its memory holds.

    Works on any machine, from the times of single commands that were measured when the plan was made.

    \b
    Examples:
      nimblec explain model.plan
    """
    opened = read_plan(plan)
    programs = {program.name: program for program in opened.programs}
    if not programs or (name is not None and name not in programs):
        raise PlanError(f"{plan}: has no program {name!r}; its programs are {', '.join(map(repr, programs)) or 'none'}")
    program = programs[name] if name is not None else max(opened.programs, key=lambda p: timeline(p).work_ns)
    times = timeline(program)
    console = SafeConsole()
    said = (
        [_heading(opened, program, times), *_time(opened, program, times)] if times.spans else ["It runs no command."]
    )
    console.print(*said, sep="\n")
    if times.measured:
        console.print(_slowest(opened, program, times))
    console.print(*_memory(opened, program, plan.stat().st_size), sep="\n")


def _heading(plan: Plan, program: Program, times: Timeline) -> str:
    others = f" of {len(plan.programs)}" if len(plan.programs) > 1 else ""
    return (
        f"Program {program.name!r}{others} on {plan.device.name}: {_count(len(times.spans), 'command')} on "
        f"{_count(program.stream_count, 'stream')}."
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _us(nanoseconds: float) -> str:
    return seconds_text(nanoseconds / 1e9)


def _time(plan: Plan, program: Program, times: Timeline) -> Iterator[str]:
    path = _count(len(times.critical_path), "command")
    if not times.measured:
        yield (
            f"Its critical path has {path}, one after another. The plan records no times (--reproducible), so what "
            "takes long is not known: `nimblec bench --profile` measures it."
        )
        return
    at_once = times.work_ns / times.duration_ns
    advice = "only a faster critical path makes a run faster" if at_once > _ALONE else "they run one after another"
    yield (
        f"Time: {_us(times.duration_ns)} on the critical path of {path}, of {_us(times.work_ns)} of work: "
        f"{at_once:.2f} commands run at a time, {advice}."
        if len(times.spans) > 1
        else f"Time: {_us(times.duration_ns)} in one command."
    )
    if run_ns := measured_run_ns(program):
        more = run_ns - times.duration_ns
        cost = (
            f"{_us(more)} ({more / run_ns:.0%}) go into starting commands, events and streams that slow each other down"
        )
        yield f"A whole run took {_us(run_ns)}: {cost if more > 0 else 'starting commands costs nothing that shows'}."
    launches = [work.duration_ns for _, work in program.work if isinstance(work, Launch)]
    short = [duration for duration in launches if 0 < duration < _START_NS]
    if plan.target is Target.CUDA and short:
        share = f"{sum(short) / times.work_ns:.0%} of the work"
        yield f"Launches of less than {_us(_START_NS)}, which mostly start and end: {len(short)}, {share}."
    if times.unmeasured:
        yield f"{_count(times.unmeasured, 'command')} without a recorded time count as the shortest that has one."


def _slowest(plan: Plan, program: Program, times: Timeline) -> Table:
    ranked = sorted(times.spans, key=lambda span: -span.duration_ns)
    reached = [*accumulate(span.duration_ns for span in ranked)]
    half = next(i for i, total in enumerate(reached, 1) if total >= times.work_ns / 2)
    right = ("command", "time", "share", "GB/s")
    title = f"Commands, the slowest first; half of the time is in {half} of {len(ranked)}"
    made = table(title, "command", "kind", "source", "kernel", *right[1:], "path", right=right)
    critical = {times.spans[index].command for index in times.critical_path}
    for span in ranked[:_SLOWEST]:
        work, what = span.work, kind(program, span.work)
        symbol = plan.kernels[work.kernel].symbol if isinstance(work, Launch) else ""
        nbytes = sum(access.nbytes for access in (*pieces.reads(work), *pieces.writes(work)))
        made.add_row(
            str(span.command),
            _short(what),
            _short(program.ops[work.op].source),
            _short(symbol) if symbol != what else "",
            _us(span.duration_ns),
            f"{span.duration_ns / times.work_ns:.1%}",
            f"{nbytes / max(span.duration_ns, 1):,.1f}",
            "critical" if span.command in critical else "",
        )
    return made


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _memory(plan: Plan, program: Program, file_nbytes: int) -> Iterator[str]:
    size = {name: nbytes_text(nbytes) for name, nbytes in sizes(plan, file_nbytes=file_nbytes).items()}
    largest = max(plan.weights, key=lambda weight: weight.data.nbytes, default=None)
    named = f", the largest {largest.name!r} with {nbytes_text(largest.data.nbytes)}" if largest else ""
    yield f"File: {size['file']}, of which weights are {size['weights']}{named}, and code {size['code']}."
    is_largest = program.arena_nbytes == plan.arena_nbytes
    bound = program.schedule.arena_lower_bound_nbytes if program.schedule and is_largest else 0
    above = f" ({program.arena_nbytes / bound - 1:.0%} above what is live at once)" if bound else ""
    transfers = nbytes_text(sum((*program.input_nbytes, *program.output_nbytes)))
    yield (
        f"Memory: the weights once, and for each context an arena of {size['arena']}{above}, state of {size['state']} "
        f"and {transfers} for inputs and outputs."
    )
