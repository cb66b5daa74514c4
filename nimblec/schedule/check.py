"""An independent check of schedules, by vector clocks over their streams."""

from collections.abc import Iterator, Sequence

from nimblec.base.ir import Schedule
from nimblec.schedule.dag import Dag, ancestors, transitive_reduction


def problems(dag: Dag, schedule: Schedule, antichain: Sequence[int] | None = None) -> Iterator[str]:
    """Yield a sentence for each dependency of ``dag`` that ``schedule`` does not enforce.

    With ``antichain`` also for each promise of `maximal` that is broken: as many streams as the antichain
    has tasks, and no wait that is not an edge of the reduction.
    """
    if sorted(schedule.order) != list(range(dag.task_count)):
        yield f"order: must list each of the {dag.task_count} tasks once"
        return
    position = {task: place for place, task in enumerate(schedule.order)}
    # For each position, the last earlier position on each stream.
    latest: list[dict[int, int]] = []
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
