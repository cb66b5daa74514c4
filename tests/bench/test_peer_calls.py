"""The GPU time of calls from a profiler's trace."""

import pytest
import torch

from bench import peer_calls
from bench.peer_calls import CALLS, Span, figures


def trace(calls: int, *kernels: Span, apart_us: float = 3000.0) -> list[Span]:
    """Return the same kernels in each call."""
    return [(begin + apart_us * i, end + apart_us * i) for i in range(calls) for begin, end in kernels]


def test_figures_span_the_kernels_of_each_call() -> None:
    found = figures(reversed(trace(CALLS, (0.0, 10.0), (12.0, 20.0), (14.0, 16.0), (30.0, 40.0))))
    assert found["kernels_us"] == {"p5": 40.0, "median": 40.0, "p95": 40.0}
    assert found["busy_us"]["median"] == 28.0  # two kernels that run side by side count once
    assert found["kernels"] == 4


def test_figures_end_with_the_longest_kernel() -> None:
    found = figures(trace(CALLS, (0.0, 50.0), (10.0, 20.0), (45.0, 55.0)))
    assert (found["kernels_us"]["median"], found["busy_us"]["median"]) == (55.0, 55.0)


@pytest.mark.parametrize("calls", [0, CALLS - 1, CALLS + 1])
def test_figures_reject_a_trace_of_other_calls(calls: int) -> None:
    assert figures(trace(calls, (0.0, 10.0))) == {
        "untraced": f"the profiler's trace shows {calls} calls, {CALLS} were made"
    }


def test_apart_pauses_longer_than_a_gap_within_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(peer_calls.time, "sleep", pauses.append)
    made: list[int] = []
    peer_calls.apart(lambda: made.append(len(pauses)))
    assert made == list(range(CALLS))
    assert min(pauses) * 1e6 > peer_calls._LONGEST_GAP_US


@pytest.mark.gpu
def test_by_torch_traces_the_kernels_of_each_call() -> None:
    x = torch.ones(1 << 20, device="cuda")

    def call() -> None:
        x.mul_(2.0).add_(1.0)
        torch.cuda.synchronize()

    call()
    spans = peer_calls.by_torch(call)  # how far apart depends on what else the GPU does
    assert len(spans) == 2 * CALLS
    assert all(begin < end for begin, end in spans)
