"""The benchmark models: the same bits under every policy, under delays, and after a thousand replays.

Run on the GPU by ``pytest -m "gpu and slow" tests/cuda/test_benchmarks.py``; needs timm, torchvision
and transformers.
"""

from typing import TYPE_CHECKING

import pytest
from delays import CUBIN, with_delays
from random_schedules import random_schedule
from replan import graph_of, replanned
from verdicts import verdicts

import nimblert
from bench.schedules import MODELS
from nimblec.schedule.dependencies import dependencies
from nimblert import golden
from nimblert.check.hazards import hazards
from nimblert.golden import Verdict

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

POLICIES = ("1", "max", "auto")
SEEDS = 20
REPLAYS = 1000


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    for model in MODELS:  # in the order in which the tests wait for them
        for policy in POLICIES:
            gpu_compiler.start(model, streams=policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_a_policy_changes_no_bit(gpu_compiler: "GpuCompiler", model: str, policy: str) -> None:
    plan = gpu_compiler.plan(model, streams=policy)
    program = plan.programs[0]
    assert list(hazards(program)) == []
    assert verdicts(plan) == {Verdict.BIT_EXACT}
    if policy == "max":
        assert program.schedule is not None
        assert program.stream_count == len(program.schedule.antichain)


@pytest.mark.parametrize("model", MODELS)
def test_random_schedules_with_random_delays_change_no_bit(gpu_compiler: "GpuCompiler", model: str) -> None:
    widest = gpu_compiler.plan(model, streams="max")
    dag = dependencies(graph_of(widest))
    for seed in range(SEEDS):
        plan = replanned(widest, random_schedule(dag, seed))
        assert list(hazards(plan.programs[0])) == []
        assert verdicts(with_delays(plan, seed, CUBIN.read_bytes())) == {Verdict.BIT_EXACT}, seed


@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_replays_give_one_digest(gpu_compiler: "GpuCompiler", model: str) -> None:
    plan = gpu_compiler.plan(model)
    inputs = golden.draw_inputs(plan.programs[0], 1)
    with nimblert.load(plan, poison=True) as executable:
        digests = {tuple(map(golden.digest, executable.run(inputs).values())) for _ in range(REPLAYS)}
    assert len(digests) == 1
