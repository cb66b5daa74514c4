"""A lower bound on the arena under a schedule."""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from nimblec.schedule.lifetimes import Lifetimes


def arena_lower_bound(live: Lifetimes) -> int:
    """Return the bytes of the largest set of buffers that must be in memory together.

    That set is the heaviest antichain of the buffers' precedence, found exactly by a maximum flow (Dilworth's theorem
    with weights). No arena can be smaller; whether one of this size exists is NP-hard to decide. Sizes are rounded down
    to units of 2^k bytes, with the smallest k for which their sum fits 31 bits.
    """
    unit = 1
    while (live.sizes // unit).sum() >= 1 << 31:
        unit *= 2
    weights = live.sizes // unit
    return int(weights.sum() - _maximum_flow(weights, _reduced_edges(live.precedes))) * unit


def _maximum_flow(weights: NDArray[np.int64], edges: NDArray[np.int64]) -> int:
    """Return the maximum flow from buffers to the buffers after them.

    Nodes: 0 the source, 1 the sink, and for each buffer one that gives and one that takes, each at most
    its weight; flow may pass through a buffer, which stands for the edges of the closure.
    """
    count = len(weights)
    if not count:
        return 0
    giver, taker = np.arange(count) + 2, np.arange(count) + 2 + count
    unlimited = np.full(count, weights.sum())
    tails = np.concatenate((np.zeros_like(giver), taker, taker, giver[edges[:, 0]]))
    heads = np.concatenate((giver, np.ones_like(taker), giver, taker[edges[:, 1]]))
    room = np.concatenate((weights, weights, unlimited, np.full(len(edges), weights.sum())))
    network = csr_array((room.astype(np.int32), (tails, heads)), shape=(2 + 2 * count, 2 + 2 * count))
    return int(maximum_flow(network, 0, 1).flow_value)


def _reduced_edges(precedes: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the pairs (before, after) with no third buffer between them, shape (edges, 2)."""
    order = np.argsort(precedes.sum(axis=0), kind="stable")  # topological: by the number of buffers before
    rows = np.packbits(precedes[np.ix_(order, order)].T, axis=1, bitorder="little")
    before = [int.from_bytes(row.tobytes(), "little") for row in rows]
    pairs = []
    for after, closure in enumerate(before):
        remaining = closure
        while remaining:
            latest = remaining.bit_length() - 1
            pairs.append((latest, after))
            remaining &= ~(before[latest] | 1 << latest)
    return order[np.array(pairs, dtype=np.int64).reshape(-1, 2)]
