"""How scheduling and memory planning grow with the number of tasks.

Run: ``python bench/schedule_scaling.py [--sizes 350,1400,10000] [--policies 1,max]``. Graphs are random
layered ones: each task writes a tensor of its own and reads one to three of the few layers before it. CPU
only; the last line is the growth between the two largest sizes, n^x.
"""

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable

from nimblec.ir import Access, Buffer, BufferKind, Graph, KernelWork, Op, Schedule, Task
from nimblec.lower import lower
from nimblec.schedule.bound import arena_lower_bound
from nimblec.schedule.dag import Dag
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.lifetimes import lifetimes
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import critical_path, limited, maximal, serial
from nimblert.edges import edges
from nimblert.hazards import hazards

Policy = Callable[[Dag, list[int]], Schedule]
POLICIES: dict[str, Policy] = {
    "1": lambda dag, _: serial(dag),
    "max": lambda dag, _: maximal(dag),
    "4": lambda dag, durations: limited(dag, 4, durations),
    "critical": lambda dag, durations: critical_path(dag, durations, 1500, 8),
}


def layered(task_count: int, width: int, seed: int) -> Graph:
    """Return ``task_count`` kernels, ``width`` to a layer, and a last one that reads what is left."""
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


def measure(graph: Graph, policy: Policy) -> tuple[dict[str, float], str]:
    """Return the seconds of each pass, and what came out."""
    marks = [("", time.perf_counter())]

    def done(name: str) -> None:
        marks.append((name, time.perf_counter()))

    durations = [task.duration_ns for task in graph.tasks]
    dag = dependencies(graph)
    done("dependencies")
    schedule = policy(dag, durations)
    done("streams")
    planned = layout(graph, schedule)
    done("memory")
    program = lower(graph, schedule, planned)
    done("lower")
    edge_count = sum(map(len, edges(program.commands)))
    done("edges")
    if problems := list(hazards(program)):
        raise SystemExit(problems[0])
    done("hazards")
    bound = arena_lower_bound(lifetimes(graph, schedule))
    seconds = {name: at - before for (_, before), (name, at) in itertools.pairwise(marks)}
    ratio = planned.arena_nbytes / bound
    return seconds, f"{schedule.stream_count:5d} {len(schedule.waits):6d} {edge_count:6d} {ratio:6.3f}"


def main() -> None:
    """Print a line for each size and policy, and how the sum of scheduling and memory planning grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="350,700,1400,2800,5000,10000")
    parser.add_argument("--policies", default="1,max,4,critical")
    parser.add_argument("--width", type=int, default=8)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    passes = ("dependencies", "streams", "memory", "lower", "edges", "hazards")
    print("  tasks policy   ", *(f"{name:>12}" for name in passes), " plan s streams waits edges arena/bound")
    planning: dict[tuple[str, int], float] = {}
    for size in sizes:
        graph = layered(size, arguments.width, seed=0)
        for name in arguments.policies.split(","):
            seconds, result = measure(graph, POLICIES[name])
            planning[name, size] = sum(seconds[step] for step in ("dependencies", "streams", "memory"))
            columns = " ".join(f"{seconds[step]:12.3f}" for step in passes)
            print(f"{size:7d} {name:9s} {columns} {planning[name, size]:7.3f} {result}", flush=True)
    if len(sizes) > 1:
        small, large = sizes[-2:]
        for name in arguments.policies.split(","):
            exponent = math.log(planning[name, large] / planning[name, small]) / math.log(large / small)
            print(f"{name}: n^{exponent:.2f} from {small} to {large} tasks")


if __name__ == "__main__":
    main()
