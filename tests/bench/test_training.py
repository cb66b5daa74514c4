"""The benchmark of training steps: the same losses in all modes, with and without autocast, and the table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from copying import copying, on_host

import nimblert
from bench import training
from bench.models import cifar_training
from bench.nimblec_peer import gpu_us
from bench.training_peer import MODES, TorchStep, grown, steps_alone
from nimblec.plan import encoder

pytest_plugins = ("gpu_memory",)


@pytest.mark.parametrize(("options", "name"), [([], "small_batch_4"), (["--autocast", "bf16"], "small_batch_4_bf16")])
def test_all_modes_train_the_same(options: list[str], name: str) -> None:
    (jobs,) = training.table(training.parser().parse_args([*options, "small_batch_4"])).jobs
    assert {job.model for job in jobs} == {name}
    assert {job.mode for job in jobs} == {*MODES}
    eager = TorchStep(name, "cpu", compiled=False)
    module, batch = getattr(cifar_training, name)()["train"]
    assert module.autocast is (torch.bfloat16 if options else None)
    with torch.no_grad():
        found = [float(module(*batch)["loss"]) for _ in range(3)]
    assert found == pytest.approx([eager() for _ in range(3)], rel=1e-3)


def test_of_the_widest_network_the_schedule_is_measured_alone() -> None:
    groups = training.table(training.parser().parse_args([])).jobs
    jobs = {group[0].model: {job.mode for job in group} for group in groups}
    assert jobs.pop(training.WIDEST) == {"O0", "compile", "eager"}
    assert {*jobs} == {*training.models(*training.BATCHES)}
    (only,) = training.table(training.parser().parse_args(["--modes", "O2,eager", "small_batch_4"])).jobs
    assert [job.mode for job in only] == ["O2", "eager"]


@on_host
def test_the_gpu_time_is_that_of_the_training_step(put: object) -> None:
    del put
    made = [copying((size,), (0,)) for size in (4, 8)]
    named = [replace(p.programs[0], name=n, entry=n) for p, n in zip(made, ("evaluate", "train"), strict=True)]
    plan = replace(made[0], programs=tuple(named))
    for step in steps_alone(plan):
        assert step.programs[0].inputs[0].shape == (8,)
        with nimblert.load(step) as loaded:
            assert gpu_us(loaded).min() > 0


@on_host
def test_the_memory_of_a_plan_is_what_the_driver_has_given_more(put: object, tmp_path: Path) -> None:
    del put
    made = copying((1 << 20,), (0,))
    plan = replace(made, programs=(replace(made.programs[0], name="train", entry="train"),))
    encoder.write(plan, tmp_path / "plan")
    found = grown(tmp_path / "plan", [np.zeros(1 << 20, np.float32)])
    assert found["driver_nbytes"] >= 3 << 22  # input, arena, output


def spread(median: float) -> dict[str, float]:
    return {"p5": median, "median": median, "p95": median}


def figures(call: float) -> dict[str, Any]:
    torch = {"peak_allocated_nbytes": 4 << 20, "peak_reserved_nbytes": 8 << 20}
    level = {"arena_nbytes": 1 << 20, "state_nbytes": 2 << 20, "weights_nbytes": 0, "driver_nbytes": 5 << 20}
    return {
        "eager": {"call_us": spread(1000), **torch},
        "compile": {"call_us": spread(200), "kernels_us": spread(180), **torch, "graph_reserved_nbytes": 9 << 20},
        "O0": {"call_us": spread(400), "kernels_us": spread(300), "chain_us": spread(600), **level},
        "O2": {"call_us": spread(call), "kernels_us": spread(90), "chain_us": spread(99), **level, "noisy": ["chain"]},
    }


def rows(table: str) -> list[dict[str, str]]:
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_the_tables_have_the_means_the_memory_and_from_where_nothing_is_won() -> None:
    models = {f"{name}_batch_32": figures(call) for name, call in zip(training.NETWORKS, (50, 100, 200), strict=True)}
    models["resnet50_batch_8_bf16"] = {"eager": {"call_us": spread(7)}, "O1": {"failed": "no memory"}}
    results = {"environment": {"gpu": "none", "cpu": "x", "commit": "abc"}, "models": models}
    times, ratios, memory, lost, below = training.markdown(results).split("\n\n")
    assert rows(times)[0]["O2 chain_us"] == "~99"
    first, *_, last, mean = rows(ratios)
    assert (first["compile's call / ours"], first["eager's call / ours"]) == ("4.00", "20.00")
    assert (first["compile's kernels / ours"], first["-O0: chain / kernels"]) == ("2.00", "2.00")
    assert first["memory: ours / eager's"] == "0.75"
    assert "-O1: chain / kernels" not in first, "not measured"
    assert {*last.values()} == {"resnet50_batch_8_bf16", "-"}
    assert mean["model"] == "geometric mean, batch_32"
    assert (mean["compile's call / ours"], mean["eager's call / ours"]) == ("2.00", "10.00")
    assert (memory_row := rows(memory)[0])["O2"] == "3.0 / 5.0"
    assert (memory_row["compile"], memory_row["compile: graph"]) == ("4.0 / 8.0", "9.0")
    assert lost.endswith("won: efficientnet_b0 never, mobilenet_v2 32, resnet50 never.")
    assert below.startswith("Commit abc")


def test_what_is_no_model_is_no_attribute() -> None:
    for name in ("resnet50", "resnet50_batch_", "resnet50_batch_2_fp8"):
        assert not hasattr(cifar_training, name)
