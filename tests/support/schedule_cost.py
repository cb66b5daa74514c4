"""A device-independent cost model of schedules."""

from collections.abc import Sequence

from nimblec.ir import Schedule


def simulate(schedule: Schedule, durations: Sequence[int], *, cross_edge_ns: int = 0, launch_ns: int = 0) -> int:
    """Return the ns from the start of the first task to the end of the last one.

    A task starts ``launch_ns`` after the task before it on its stream has ended, and
    ``cross_edge_ns`` after every task that it waits for has. Tasks of different streams do not slow
    each other down: right for small kernels, an underestimate for those that fill the device.
    """
    waits: dict[int, list[int]] = {}
    for before, after in schedule.waits:
        waits.setdefault(after, []).append(before)
    end: dict[int, int] = {}
    stream_end: dict[int, int] = {}
    for task in schedule.order:
        stream = schedule.streams[task]
        start = stream_end[stream] + launch_ns if stream in stream_end else 0
        for before in waits.get(task, ()):
            start = max(start, end[before] + cross_edge_ns)
        end[task] = stream_end[stream] = start + durations[task]
    return max(end.values(), default=0)
