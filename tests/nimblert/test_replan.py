"""A plan in another schedule computes what it did, and lacks no order but what is taken out."""

import importlib
import warnings

import numpy as np
import pytest
import torch
from cpu_plans import plan_file, run_plan
from random_schedules import random_schedule
from replan import graph_of, producer, replanned, without

from nimblec.schedule.dependencies import dependencies
from nimblert import golden
from nimblert.check import verify
from nimblert.check.hazards import hazards
from nimblert.plan import Launch, Plan, Wait


@pytest.fixture(scope="module")
def branching(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return a branching model for the CPU, in its widest schedule."""
    torch.manual_seed(0)
    module, args = importlib.import_module("families.inception").small()
    path = tmp_path_factory.mktemp("replan") / "inception.onnx"
    with warnings.catch_warnings():
        # The older exporter warns of its deprecation.
        warnings.simplefilter("ignore")
        torch.onnx.export(module, args, path, dynamo=False)
    return plan_file(path, streams=None, joins=False)


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
