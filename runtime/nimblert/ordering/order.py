"""The order of work commands, by vector clocks over the streams.

A work command (launch, copy, fill) is known by its stream and its number there. The work that has ended before it is,
for each stream, all work up to some number. These numbers form a row, which changes only where a stream waits. See
Fidge, "Timestamps in message-passing systems that preserve the partial ordering" (1988).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nimblert.plan import Command, Record, Wait


@dataclass(frozen=True, slots=True)
class Order:
    """For each work command, in issue order: its stream, its number there (from 1), and its row.

    ``rows[row, stream]`` is the number of the last work of another stream that has ended before.
    """

    stream: NDArray[np.int32]
    number: NDArray[np.int32]
    row: NDArray[np.int32]
    rows: NDArray[np.int32]

    def before(self, early: NDArray[np.int64], late: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether ``early`` has ended when ``late`` starts, for each pair; ``early`` must have been issued first."""
        streams = self.stream[early]
        ordered: NDArray[np.bool_] = self.rows[self.row[late], streams] >= self.number[early]
        ordered |= streams == self.stream[late]
        return ordered


def order(commands: Sequence[Command]) -> Order:
    """The order that streams and events impose on the ``commands`` of a verified program.

    Programmatic edges count like others: a kernel that starts early waits before it reads or writes.
    """
    stream_count = max((command.stream for command in commands), default=0) + 1
    rows = [np.zeros(stream_count, np.int32)]
    current = [0] * stream_count  # by stream: its row
    counts = [0] * stream_count  # by stream: its works so far
    events: dict[int, tuple[int, int, int]] = {}  # stream, its works and its row when the event was recorded
    streams: list[int] = []
    numbers: list[int] = []
    places: list[int] = []
    fresh: set[int] = set()  # streams whose row is not shared, and may be changed in place
    for command in commands:
        stream = command.stream
        match command:
            case Record():
                events[command.event] = stream, counts[stream], current[stream]
                fresh.discard(stream)
            case Wait():
                other, count, row = events[command.event]
                if stream not in fresh:
                    rows.append(rows[current[stream]].copy())
                    current[stream] = len(rows) - 1
                    fresh.add(stream)
                mine = rows[current[stream]]
                np.maximum(mine, rows[row], out=mine)
                mine[other] = max(mine[other], count)
            case _:
                counts[stream] += 1
                streams.append(stream)
                numbers.append(counts[stream])
                places.append(current[stream])
                fresh.discard(stream)
    return Order(np.array(streams, np.int32), np.array(numbers, np.int32), np.array(places, np.int32), np.array(rows))
