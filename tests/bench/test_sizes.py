"""The benchmark of one plan for all sizes: a small network on the CPU, and the table from made-up figures."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from copying import ORDERS, copying, on_host

from bench import sizes, sizes_peer, turns
from bench.models.sized import Sized
from bench.sizes_peer import Sizes, middles
from nimblec.plan import encoder
from nimblert.plan import Fit, Plan

pytest_plugins = ("gpu_memory",)


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="needs onnxscript")
def test_sizes_peer_equals_static_plans_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: dict[str, Any] = {}
    turn = SimpleNamespace(begin=bool, report=reported.update, end=bool)
    monkeypatch.setattr(turns, "Turn", lambda **_: turn)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # which it changes
    monkeypatch.setattr(sys, "argv", ["", "2", "sized_networks:tokens", "--sizes", "2,5", "--cpu"])
    sizes_peer.main()
    found = json.loads(json.dumps(reported))
    assert {size: row["served_by"] for size, row in found["sizes"].items()} == {"1": 2, "2": 2, "4": 5, "5": 5}
    assert all(row["equal"] and row["difference"] == 0 for row in found["sizes"].values())
    assert found["fits"] == {"2": "padded", "5": "padded"}
    assert found["arena_nbytes"] == max(static["arena_nbytes"] for static in found["static"].values())
    assert found["file_nbytes"] > max(static["file_nbytes"] for static in found["static"].values())
    for size in found["sizes"]:
        assert 0 < found[f"static_numpy_us {size}"]["p5"] <= found[f"numpy_us {size}"]["p95"] * 100
    table = sizes.markdown({"environment": {"gpu": "none", "cpu": "x"}, "models": {"m:n": {"-O2": found}}})
    assert table.count("| equal |") == 4


SHAPE = (2, 3, 6, 4)


def network(**changes: Any) -> Sized:
    """Return a network for which `copying` plans stand."""
    made = Sized(module=torch.nn.Identity(), args=(torch.zeros(SHAPE),), axis=0, largest=8, bounds={})
    return replace(made, **changes)


def saved(folder: Path, asked: Sequence[int]) -> Path:
    """Save a plan that copies images of so many rows; its only program is for all rows if there is one."""
    plans = [copying((rows, *SHAPE[1:]), ORDERS["channels last"]) for rows in asked]

    def program(plan: Plan, rows: int) -> Any:
        (made,) = plan.programs
        return replace(made, name=f"rows={rows}", entry="main", profile=(("rows", rows),), fits=(Fit.PADDED,))

    several = len(asked) > 1
    programs = tuple(map(program, plans, asked)) if several else plans[0].programs
    path = folder / f"{asked}.plan"
    encoder.write(replace(plans[0], programs=programs), path)
    return path


@on_host
def test_groups_time_calls_and_programs(
    put: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del put
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    with ExitStack() as opened:
        executables = Sizes(network(), partial(saved, tmp_path), (2, 5), opened)
        assert executables.compared(3) == {"served_by": 5, "equal": True, "difference": 0.0}
        sampled = [sample() for size in (3, 5) for sample in executables.groups(size).values()]
    found = {clock: times for group in sampled for clock, times in group.items()}
    assert all(len(times) == 100 and min(times) > 0 for times in found.values())
    every = [f"{kind}{clock}" for clock in ("numpy_us", "call_us", "kernels_us") for kind in ("", "static_")]
    assert list(found) == [*(f"{clock} 3" for clock in every[:4]), *(f"{clock} 5" for clock in every)]


@on_host
def test_compared_reports_a_refused_size(put: object, tmp_path: Path) -> None:
    del put
    with ExitStack() as opened:
        executables = Sizes(network(axis=1), partial(saved, tmp_path), (2, 5), opened)
        row = executables.compared(4)
    assert row["served_by"] == 5
    assert row["refused"] == "input 'x': shape (2, 4, 6, 4), expected (rows, 3, 6, 4)"


def test_middles_lie_between_profiles() -> None:
    assert middles((1, 2, 4, 64)) == [3, 34]
    assert middles((32, 64)) == [16, 48]
    assert middles((5, 6)) == [3]
