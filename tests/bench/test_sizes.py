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

from bench import sizes, sizes_peer
from bench.models import sized
from bench.models.sized import Sized
from bench.sizes_peer import Sizes, middles
from nimblec.plan import encoder
from nimblert.plan import Fit, Plan

pytest_plugins = ("gpu_memory",)


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="needs onnxscript")
def test_any_size_is_what_the_static_plan_of_its_profile_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: dict[str, Any] = {}
    turn = SimpleNamespace(begin=bool, report=reported.update, end=bool)
    monkeypatch.setattr(sizes_peer, "Turn", lambda **_: turn)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # which it changes
    monkeypatch.setattr(sys, "argv", ["", "2", "bench.models.sized:tokens", "--sizes", "2,5", "--cpu"])
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
    """A network for which `copying` plans stand."""
    made = Sized(module=torch.nn.Identity(), args=(torch.zeros(SHAPE),), axis=0, largest=8, bounds={})
    return replace(made, **changes)


def saved(folder: Path, asked: Sequence[int]) -> Path:
    """The plan that copies images of so many rows, in a file; its only program is for all rows if there is one."""
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
def test_calls_on_the_device_and_programs_alone_are_timed(
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
def test_a_size_that_is_refused_is_told(put: object, tmp_path: Path) -> None:
    del put
    with ExitStack() as opened:
        executables = Sizes(network(axis=1), partial(saved, tmp_path), (2, 5), opened)
        row = executables.compared(4)
    assert row["served_by"] == 5
    assert row["refused"] == "input 'x': shape (2, 4, 6, 4), expected (rows, 3, 6, 4)"


def test_sizes_are_called_between_profiles() -> None:
    assert middles((1, 2, 4, 64)) == [3, 34]
    assert middles((32, 64)) == [16, 48]
    assert middles((5, 6)) == [3]


@pytest.mark.parametrize(
    ("name", "package"),
    [("resnet50", "torchvision"), ("bert_base", "transformers"), ("rows", "torch"), ("tokens", "torch")],
)
def test_networks_have_any_size(name: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: not installed")
    with torch.device("meta"):
        made = getattr(sized, name)()
    assert {p.dtype for p in made.module.parameters()} == {torch.float32 if package == "torch" else torch.float16}
    drawn = made.draw(7, 0)
    for tensor, example in zip(drawn, made.args, strict=True):
        assert tensor.shape[made.axis] == 7
        assert tensor.dtype is example.dtype
        assert tensor.ndim != 4 or tensor.is_contiguous(memory_format=torch.channels_last)
    assert drawn[0].unique().numel() > 1
    assert all((mask == 1).all() for mask in drawn[1:])


def spread(median: float) -> dict[str, float]:
    return {"p5": median - 1, "median": median, "p95": median + 1}


FIGURES = {
    "static": {
        "8": {"file_nbytes": 60 << 20, "arena_nbytes": 3 << 20},
        "16": {"file_nbytes": 50 << 20, "arena_nbytes": 6 << 20},
    },
    "file_nbytes": 66 << 20,
    "arena_nbytes": 6 << 20,
    "sizes": {
        "16": {"served_by": 16, "equal": False, "difference": 0.00123},
        "8": {"served_by": 8, "equal": True, "difference": 0.0},
        "12": {"served_by": 16, "refused": "'main' has programs for 8, 16"},
    },
    "call_us 8": spread(210),
    "static_call_us 8": spread(200),
    "numpy_us 8": spread(300),
    "static_numpy_us 8": spread(300),
    "kernels_us 8": spread(150),
    "static_kernels_us 8": spread(160),
    "call_us 16": spread(400),
    "static_call_us 16": spread(320),
    "noisy": ["call 16"],
    "commit": "abc",
}


def test_the_table_has_a_line_for_each_size_and_a_sentence_for_each_plan() -> None:
    models = {
        "bench.models.sized:resnet50": {"-O2": FIGURES},
        "bench.models.sized:bert_base": {"-O2": {"failed": "no memory", "commit": "abc"}},
    }
    results = {"environment": {"gpu": "none", "cpu": "x"}, "models": models}
    _, _, *lines, _, first, second, below = sizes.markdown(results).splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["sized:resnet50 -O2", "8", "8", "150 / 160 (0.94)", "210 / 200 (1.05)", "300 / 300 (1.00)", "equal"],
        ["sized:resnet50 -O2", "12", "16", "-", "-", "-", "refused"],
        ["sized:resnet50 -O2", "16", "16", "-", "~400 / ~320 (1.25)", "-", "differs by 1.2e-03"],
    ]
    assert first == (
        "sized:resnet50 -O2: the file has 66.0 MiB, 1.10 times the largest static plan's; the arena 6.0 MiB, of the "
        "largest static plan 6.0; a call takes at most 1.25 times the static plan's (size 16)."
    )
    assert second == "sized:bert_base -O2: failed: no memory."
    assert below == "Commit abc; x."


def test_a_plan_that_refuses_all_sizes_has_a_table() -> None:
    figures = {**FIGURES, "sizes": {"12": {"served_by": 16, "refused": "'main' has programs for 8, 16"}}}
    results = {"environment": {"gpu": "none", "cpu": "x"}, "models": {"a:b": {"-O2": figures}}}
    assert "of the largest static plan 6.0; no size was called." in sizes.markdown(results)


def test_the_profiles_may_be_chosen() -> None:
    (jobs,) = sizes.table(sizes.parser().parse_args(["--cpu", "--level", "1", "a:b=1,8"])).jobs
    assert [(job.model, job.mode) for job in jobs] == [("a:b", "-O1")]
    assert jobs[0].command[2:6] == ("bench.sizes_peer", "1", "a:b", "--sizes")
    assert jobs[0].command[6:] == ("1,8", "--workers", "8", "--cpu", "--turns")
    every = [job for jobs in sizes.table(sizes.parser().parse_args([])).jobs for job in jobs]
    assert [job.model for job in every] == ["bench.models.sized:resnet50", "bench.models.sized:bert_base"]
    assert all("--cpu" not in job.command for job in every)
