"""A plan in another schedule computes what it did, and lacks no order but what is taken out."""

import importlib
import warnings

import numpy as np
import pytest
import torch
from cpu_plans import plan_file, run_plan
from plans import cuda_plan
from random_schedules import random_schedule
from replan import graph_of, producer, replanned, without

from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.streams import maximal, serial
from nimblert import golden
from nimblert.check import verify
from nimblert.check.hazards import hazards
from nimblert.plan import Launch, Memcpy, Memset, Plan, Wait


@pytest.fixture(scope="module")
def branching(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A branching model for the CPU, in its widest schedule."""
    torch.manual_seed(0)
    module, args = importlib.import_module("families.inception").small()
    path = tmp_path_factory.mktemp("replan") / "inception.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's deprecation is not what is tested
        torch.onnx.export(module, args, path, dynamo=False)
    return plan_file(path, streams=None, joins=False)


def test_the_serial_schedule_is_the_order_of_issue() -> None:
    plan = cuda_plan()
    again = replanned(plan, serial(dependencies(graph_of(plan))))
    work = [c for c in again.programs[0].commands if isinstance(c, Launch | Memcpy | Memset)]
    given = [c for c in plan.programs[0].commands if isinstance(c, Launch | Memcpy | Memset)]
    assert [(type(c), c.op) for c in work] == [(type(c), c.op) for c in given]
    launches = [(a, b) for a, b in zip(work, given, strict=True) if isinstance(a, Launch) and isinstance(b, Launch)]
    for a, b in launches:
        assert (a.kernel, a.params, a.relocations, a.reads, a.writes) == (
            (b.kernel, b.params, b.relocations, b.reads, b.writes)
        )
    assert list(verify.problems(again)) == []
    assert again.programs[0].outputs == plan.programs[0].outputs
    assert again.programs[0].golden == plan.programs[0].golden


def test_the_widest_schedule_comes_back(branching: Plan) -> None:
    assert branching.programs[0].stream_count > 3
    again = replanned(branching, maximal(dependencies(graph_of(branching))))
    assert again.programs[0].commands == branching.programs[0].commands


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_compute_the_same(branching: Plan, seed: int) -> None:
    other = replanned(branching, random_schedule(dependencies(graph_of(branching)), seed))
    assert list(verify.problems(other)) == []
    assert list(hazards(other.programs[0])) == []
    inputs = golden.draw_inputs(branching.programs[0], 0)
    for actual, expected in zip(run_plan(other, inputs), run_plan(branching, inputs), strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)


def test_no_wait_can_be_missing(branching: Plan) -> None:
    commands = branching.programs[0].commands
    waits = [i for i, c in enumerate(commands) if isinstance(c, Wait)]
    assert waits
    for wait in waits:
        late = producer(commands, wait)
        assert late < wait
        assert isinstance(commands[late], Launch)
        found = list(hazards(without(branching, wait).programs[0]))
        assert any(f"commands[{late}]" in sentence for sentence in found)
