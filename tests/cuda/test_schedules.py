"""Every schedule computes the same bits, whatever is late; a wait that is missing is found."""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import eager
import numpy as np
import pytest
from delays import CUBIN, with_delays, with_delays_before
from random_schedules import random_schedule
from replan import graph_of, producer, replanned, without
from verdicts import unchecked_verdicts, verdicts

import nimblert
from nimblec.schedule.dependencies import dependencies
from nimblert import golden
from nimblert.check.hazards import hazards
from nimblert.cuda import driver, profiling
from nimblert.golden import Verdict
from nimblert.plan import Plan, ScheduleRecord, Wait

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

BRANCHING, TRANSFORMER = "families.inception:small", "gpu_models:transformer"
LEVELS = {BRANCHING: 0, TRANSFORMER: 0, "gpu_models:concatenating": 2}
"""At level 2 our kernels are in branches, and start early after whatever is before them."""
POLICIES = ("1", "2", "4", "max", "auto")
REPLAYS = 1000
PLANTED = 6  # missing waits to plant
LONG_NS = 5_000_000


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    for policy in POLICIES:
        gpu_compiler.start(BRANCHING, streams=policy)
    for model, level in LEVELS.items():
        gpu_compiler.start(model, streams="max", level=level)


@pytest.fixture(scope="module")
def delay(gpu_compiler: "GpuCompiler") -> bytes:
    """Return the code of the delay kernel."""
    del gpu_compiler  # has started the driver
    if driver.describe().compute_capability[0] != 9:
        pytest.skip("needs a GPU of compute capability 9: the delay kernel is built for that")
    return CUBIN.read_bytes()


@pytest.fixture(scope="module")
def reference() -> eager.Eager:
    """Return the branching model as torch runs it."""
    return eager.build(BRANCHING)


def schedule(plan: Plan) -> ScheduleRecord:
    record = plan.programs[0].schedule
    assert record is not None
    return record


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_computes_what_torch_does(gpu_compiler: "GpuCompiler", reference: eager.Eager, policy: str) -> None:
    plan = gpu_compiler.plan(BRANCHING, streams=policy)
    assert list(hazards(plan.programs[0])) == []
    assert verdicts(plan) == {Verdict.BIT_EXACT}
    inputs = golden.draw_inputs(plan.programs[0], 1)
    with nimblert.load(plan, poison=True) as executable:
        eager.assert_equal(plan, executable.run(inputs), reference(list(inputs.values())))


def test_policies_use_as_many_streams_as_they_say(gpu_compiler: "GpuCompiler") -> None:
    streams = {p: gpu_compiler.plan(BRANCHING, streams=p).programs[0].stream_count for p in POLICIES}
    widest = gpu_compiler.plan(BRANCHING, streams="max")
    assert streams["1"] == 1
    assert streams["2"] == 2
    assert 2 < streams["4"] <= 4
    assert streams["max"] == len(schedule(widest).antichain) >= 4
    assert schedule(widest).policy == "max"


def test_auto_is_the_fastest_of_what_it_tried(gpu_compiler: "GpuCompiler") -> None:
    record = schedule(gpu_compiler.plan(BRANCHING))
    times = {c.policy: c.duration_ns for c in record.candidates}
    assert {"1", "2", "max"} <= times.keys()
    assert all(times.values())
    assert times[record.policy] <= times["1"]
    assert 0.99 * times[record.policy] <= min(times.values()) or record.policy == "1"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("model", LEVELS)
def test_random_schedules_with_random_delays(gpu_compiler: "GpuCompiler", delay: bytes, model: str, seed: int) -> None:
    widest = gpu_compiler.plan(model, streams="max", level=LEVELS[model])
    plan = replanned(widest, random_schedule(dependencies(graph_of(widest)), seed))
    assert list(hazards(plan.programs[0])) == []
    assert verdicts(with_delays(plan, seed, delay)) == {Verdict.BIT_EXACT}


@pytest.mark.parametrize("policy", ["auto", "max"])
def test_a_thousand_replays_give_one_digest(gpu_compiler: "GpuCompiler", policy: str) -> None:
    plan = gpu_compiler.plan(BRANCHING, streams=policy)
    inputs = golden.draw_inputs(plan.programs[0], 1)
    with nimblert.load(plan, poison=True) as executable:
        digests = {tuple(map(golden.digest, executable.run(inputs).values())) for _ in range(REPLAYS)}
    assert len(digests) == 1


def test_a_missing_wait_is_found_by_the_checker(gpu_compiler: "GpuCompiler") -> None:
    plan = gpu_compiler.plan(BRANCHING, streams="max")
    waits = list(_waits(plan))
    assert len(waits) >= PLANTED
    for wait in waits:
        assert list(hazards(without(plan, wait).programs[0])), wait


def test_a_missing_wait_is_found_by_a_delay(gpu_compiler: "GpuCompiler", delay: bytes) -> None:
    plan = gpu_compiler.plan(BRANCHING, streams="max")
    found = []
    for wait in islice(_waits(plan), PLANTED):
        late = {producer(plan.programs[0].commands, wait): LONG_NS}
        assert verdicts(with_delays_before(plan, late, delay)) == {Verdict.BIT_EXACT}
        found.append(unchecked_verdicts(with_delays_before(without(plan, wait), late, delay)))
    # The device may still run two branches one after the other, by chance in the right order.
    assert {Verdict.DIFFERENT} in found, found


def test_a_delay_takes_the_time_it_says(gpu_compiler: "GpuCompiler", delay: bytes) -> None:
    plan = gpu_compiler.plan(BRANCHING, streams="1")
    (program,) = plan.programs
    with nimblert.load(with_delays_before(plan, {0: LONG_NS}, delay)) as executable:
        executable.run(golden.draw_inputs(program, 1))
        backend: Any = executable._backends[program.name]
        microseconds = float(np.median(profiling.replay_times(backend, 5)))
    assert 0.99 * LONG_NS / 1e3 <= microseconds < 10 * LONG_NS / 1e3


def _waits(plan: Plan) -> Iterator[int]:
    """Yield the positions of the waits."""
    return (i for i, c in enumerate(plan.programs[0].commands) if isinstance(c, Wait))
