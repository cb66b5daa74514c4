"""Policies that choose a stream for every task, and the waits between streams.

Each takes the dependencies of a graph and returns a valid schedule.
"""

import random
from collections.abc import Iterable, Iterator, Sequence

from nimblec.ir import Schedule
from nimblec.schedule.dag import Dag, ancestors, transitive_reduction
from nimblec.schedule.matching import fewest_chains


def serial(dag: Dag) -> Schedule:
    """Return the captured order on one stream."""
    count = dag.task_count
    return Schedule(order=tuple(range(count)), streams=(0,) * count, stream_count=min(count, 1), waits=())


def maximal(dag: Dag) -> Schedule:
    """Return the schedule that orders no two tasks without need, on the fewest streams.

    Nimble (NeurIPS 2020), Algorithm 1: chains from a maximum matching of the minimum equivalent
    graph E', and a wait for each edge of E' between chains. Chains that always follow one another
    then share a stream, so the streams are as many as the largest set of tasks that may run at the
    same time.
    """
    reduced = transitive_reduction(dag)
    return arrange(reduced, range(dag.task_count), fewest_chains(reduced).chain_of)


def random_schedule(dag: Dag, seed: int) -> Schedule:
    """Return a valid schedule with nothing else to be said for it: for tests of concurrency."""
    generator = random.Random(seed)  # noqa: S311  (not for secrets)
    stream_count = generator.randint(1, max(1, min(16, dag.task_count)))
    successors = dag.successors
    missing = [len(before) for before in dag.predecessors]
    ready = [task for task, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        task = ready.pop(generator.randrange(len(ready)))
        order.append(task)
        for successor in successors[task]:
            missing[successor] -= 1
            if missing[successor] == 0:
                ready.append(successor)
    return arrange(dag, order, [generator.randrange(stream_count) for _ in order])


def arrange(dag: Dag, order: Iterable[int], streams: Sequence[int]) -> Schedule:
    """Return the schedule with this order of issue, these streams and the fewest waits.

    ``order`` must respect ``dag``; ``streams[task]`` may be any numbers, and are renumbered from 0
    in order of issue. A wait is left out where the streams and the other waits imply it.
    """
    order = tuple(order)
    names: dict[int, int] = {}
    for task in order:
        names.setdefault(streams[task], len(names))
    renamed = tuple(names[stream] for stream in streams)
    return Schedule(order=order, streams=renamed, stream_count=len(names), waits=_waits(dag, order, renamed))


def _waits(dag: Dag, order: Sequence[int], streams: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the edges between streams in the reduction of ``dag`` together with the streams' order."""
    position = {task: place for place, task in enumerate(order)}
    last: dict[int, int] = {}
    predecessors = []
    for place, task in enumerate(order):
        before = {position[predecessor] for predecessor in dag.predecessors[task]}
        if streams[task] in last:
            before.add(last[streams[task]])
        last[streams[task]] = place
        predecessors.append(tuple(sorted(before)))
    reduced = transitive_reduction(Dag(predecessors=tuple(predecessors)))
    pairs = ((order[before], order[after]) for before, after in reduced.edges)
    return tuple((before, after) for before, after in pairs if streams[before] != streams[after])


def problems(dag: Dag, schedule: Schedule, antichain: Sequence[int] | None = None) -> Iterator[str]:
    """Yield a sentence for each way in which ``schedule`` breaks its promises.

    With ``antichain`` also those of `maximal`: the streams are no more than the tasks of the
    antichain, and every wait is an edge of the reduction.
    """
    if sorted(schedule.order) != list(range(dag.task_count)):
        yield f"order: must list each of the {dag.task_count} tasks once"
        return
    position = {task: place for place, task in enumerate(schedule.order)}
    latest: list[dict[int, int]] = []  # by position: the last position on each stream that is before it
    on_stream: dict[int, dict[int, int]] = {}
    waits: dict[int, list[int]] = {}
    for before, after in schedule.waits:
        waits.setdefault(after, []).append(before)
        if position[before] >= position[after]:
            yield f"waits: task {after} is issued before task {before}, for which it waits"
            return
    for place, task in enumerate(schedule.order):
        known = dict(on_stream.get(schedule.streams[task], {}))
        for before in waits.get(task, ()):
            for stream, seen in latest[position[before]].items():
                known[stream] = max(known.get(stream, -1), seen)
        for before in dag.predecessors[task]:
            if known.get(schedule.streams[before], -1) < position[before]:
                yield f"task {task}: may start before task {before}, which it depends on, has ended"
        known[schedule.streams[task]] = place
        latest.append(known)
        on_stream[schedule.streams[task]] = known
    if antichain is not None:
        yield from _certificate_problems(dag, schedule, antichain)


def _certificate_problems(dag: Dag, schedule: Schedule, antichain: Sequence[int]) -> Iterator[str]:
    if len(set(antichain)) != schedule.stream_count:
        yield f"antichain: {len(set(antichain))} tasks do not prove {schedule.stream_count} streams fewest"
    before = ancestors(dag)
    for task in antichain:
        for other in antichain:
            if before[task] >> other & 1:
                yield f"antichain: task {other} comes before task {task}"
    edges = set(transitive_reduction(dag).edges)
    for wait in schedule.waits:
        if wait not in edges:
            yield f"waits: {wait} is no edge of the reduced graph"
