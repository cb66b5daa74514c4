"""The least arena that any layout could need under a schedule."""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from nimblec.schedule.lifetimes import Lifetimes


def arena_lower_bound(live: Lifetimes) -> int:
    """Return the bytes of the largest set of buffers that must be in memory together.

    That is the heaviest set of buffers of which any two conflict. Precedence of buffers is a partial
    order, so the set is its heaviest antichain, found exactly by a maximum flow (Dilworth's theorem
    with weights). An arena can never be smaller; whether one this small exists is NP-hard to tell.
    Sizes are counted in units of 2^k bytes, rounded down, k the least for which their sum fits 31
    bits.
    """
    unit = 1
    while (live.sizes // unit).sum() >= 1 << 31:
        unit *= 2
    weights = live.sizes // unit
    return int(weights.sum() - _maximum_flow(weights, _reduced_edges(live.precedes))) * unit


def _maximum_flow(weights: NDArray[np.int64], edges: NDArray[np.int64]) -> int:
    """Return the most weight that can be handed from buffers to buffers after them.

    Nodes: 0 the source, 1 the sink, and for each buffer one that gives (its weight at most) and one
    that takes (as much); what is taken may be passed on, which stands for the edges of the closure.
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
    """Return the pairs (before, after) that no third buffer lies between, shape (edges, 2)."""
    order = np.argsort(precedes.sum(axis=0), kind="stable")  # who has fewer before it comes first
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
