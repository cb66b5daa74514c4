"""Time of scheduling and memory planning, by the number of tasks.

Usage: ``python -m bench.schedule_scaling [--markdown] [--sizes 350,1400,10000] [--policies 1,max]``. Graphs are
random layered ones: each task writes a tensor of its own and reads one to three of the few layers before it.
Writes bench/results/cpu/schedule_scaling.json, or prints its table with --markdown.
"""

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import environment
from bench.tables import by_columns, number
from nimblec.base.ir import Access, Buffer, BufferKind, Graph, KernelWork, Op, Schedule, Task
from nimblec.plan.lower import lower
from nimblec.schedule.bound import arena_lower_bound
from nimblec.schedule.dag import Dag
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.lifetimes import lifetimes
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import critical_path, limited, maximal, serial
from nimblert.check.hazards import hazards

RESULTS = Path(__file__).parent / "results" / "cpu" / "schedule_scaling.json"
PLANNING = ("dependencies", "streams", "memory")
Policy = Callable[[Dag, list[int]], Schedule]
POLICIES: dict[str, Policy] = {
    "1": lambda dag, _: serial(dag),
    "max": lambda dag, _: maximal(dag),
    "4": lambda dag, durations: limited(dag, 4, durations),
    "critical": lambda dag, durations: critical_path(dag, durations, 1500, 8),
}


def layered(task_count: int, width: int, seed: int) -> Graph:
    """Return ``task_count`` kernels, ``width`` to a layer; the last one reads every tensor that is still unread."""
    generator = random.Random(seed)  # noqa: S311  (not for secrets)
    buffers: list[Buffer] = []
    tasks: list[Task] = []
    unread: set[int] = set()
    for index in range(task_count):
        start = index // width * width
        latest = range(max(0, start - 2 * width), start)
        count = min(len(latest), generator.choice((1, 1, 1, 2, 2, 3)))
        sources = sorted(generator.sample(latest, count)) if index < task_count - 1 else sorted(unread)
        unread = (unread - set(sources)) | {index}
        shrink = 1 << min(10, index * 12 // task_count)  # activations get smaller towards the end
        nbytes = generator.choice((1 << 20, 1 << 19, 3 << 18)) // shrink
        buffers.append(Buffer(kind=BufferKind.TEMPORARY, nbytes=nbytes))
        reads = tuple(Access(buffer=source, offset=0, nbytes=buffers[source].nbytes) for source in sources)
        writes = (Access(buffer=index, offset=0, nbytes=nbytes),)
        work = KernelWork(kernel=0, params=b"", references=())
        tasks.append(Task(op=0, work=work, reads=reads, writes=writes, duration_ns=generator.randint(2000, 20000)))
    op = Op(name="layer", source="")
    return Graph(modules=(), kernels=(), buffers=tuple(buffers), ops=(op,), tasks=tuple(tasks), inputs=(), outputs=())


def measure(graph: Graph, policy: Policy) -> dict[str, Any]:
    """Return the seconds of each pass, and the sizes of the result."""
    durations = [task.duration_ns for task in graph.tasks]
    marks = [time.perf_counter()]
    dag = dependencies(graph)
    marks.append(time.perf_counter())
    schedule = policy(dag, durations)
    marks.append(time.perf_counter())
    planned = layout(graph, schedule)
    marks.append(time.perf_counter())
    if problems := list(hazards(lower(graph, schedule, planned))):
        raise SystemExit(problems[0])
    seconds = (round(after - before, 4) for before, after in itertools.pairwise(marks))
    return {
        "seconds": dict(zip(PLANNING, seconds, strict=True)),
        "streams": schedule.stream_count,
        "waits": len(schedule.waits),
        "arena_nbytes": planned.arena_nbytes,
        "arena_lower_bound_nbytes": arena_lower_bound(lifetimes(graph, schedule)),
    }


def planning_seconds(measured: Mapping[str, Any]) -> float:
    """Return the seconds of scheduling and memory planning together."""
    return sum(measured["seconds"][name] for name in PLANNING)


def _seconds(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda measured: number(measured["seconds"][name], 2)


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tasks": lambda measured: f"{measured['tasks']:,}",
    "policy": lambda measured: measured["policy"],
    **{f"{name}, s": _seconds(name) for name in PLANNING},
    "sum, s": lambda measured: number(planning_seconds(measured), 2),
    "streams / syncs": lambda measured: f"{measured['streams']} / {measured['waits']}",
    "arena / bound": lambda measured: number(measured["arena_nbytes"] / measured["arena_lower_bound_nbytes"], 3),
}


def markdown(results: dict[str, Any]) -> str:
    """Return the table of docs/measured.md, and the growth of the sum between the two largest of several sizes."""
    rows = results["rows"]
    *_, small, large = (0, *sorted({measured["tasks"] for measured in rows}))
    growth = f"Growth between the two largest sizes: {_growth(rows, small, large)}. " if small else ""
    lines = by_columns(COLUMNS, ((measured,) for measured in rows))
    return "\n".join([*lines, "", growth + environment.provenance(results)])


def _growth(rows: list[dict[str, Any]], small: int, large: int) -> str:
    """Return the exponents x of n^x, by policy."""
    sums = {(each["policy"], each["tasks"]): planning_seconds(each) for each in rows}
    found = []
    for name in dict.fromkeys(each["policy"] for each in rows):
        exponent = math.log(sums[name, large] / sums[name, small]) / math.log(large / small)
        found.append(f"n^{exponent:.1f} ({name})")
    return ", ".join(found)


def main() -> None:
    """Measure each size and policy, or print the table of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--sizes", default="350,1400,5000,10000")
    parser.add_argument("--policies", default="1,max,4,critical")
    parser.add_argument("--width", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown(environment.read(RESULTS)))
        return
    rows: list[dict[str, Any]] = []
    for size in map(int, arguments.sizes.split(",")):
        graph = layered(size, arguments.width, seed=0)
        for name in arguments.policies.split(","):
            rows.append({"tasks": size, "policy": name, **measure(graph, POLICIES[name])})
            print(rows[-1], flush=True)
    environment.write(RESULTS, {"rows": rows})
    print(markdown(environment.read(RESULTS)))


if __name__ == "__main__":
    main()
