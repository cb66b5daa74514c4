"""Loops and branches on a GPU: one launch runs them, whatever the inputs are."""

from typing import Any

import numpy as np
import pytest
import torch
from control_models import MODELS
from torch.utils import _pytree as pytree

import nimblec
import nimblert
from nimblert.errors import InputError
from nimblert.plan import Memcpy, Switch, While

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def compiled(name: str, **options: Any) -> tuple[nimblert.Executable, torch.nn.Module]:
    torch.manual_seed(0)
    module, args = MODELS[name]()
    plan = nimblec.compile(module.eval(), args, target="cuda", plan_cache=None, **options)
    return nimblert.load(plan), module.cuda()


def variants(args: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs of other signs and counts."""
    if args[-1].dtype is not torch.int64:
        return [args, tuple(-arg for arg in args)]
    return [(*(arg * sign for arg in args[:-1]), torch.tensor(count)) for count in (0, 1, 6) for sign in (1, -1)]


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_computes_what_the_module_does(name: str, level: int) -> None:
    exe, module = compiled(name, level=level)
    torch.manual_seed(0)
    _, given = MODELS[name]()
    with exe, torch.no_grad():
        for args in variants(given):
            found = exe(*(arg.numpy() for arg in args))
            expected = pytree.tree_leaves(module(*(arg.cuda() for arg in args)))
            for mine, theirs in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
                np.testing.assert_allclose(mine, theirs.cpu().numpy(), rtol=1e-4, atol=1e-4)
        kinds = {type(command) for _, command in exe.plan.programs[0].work}
        assert kinds & {While, Switch}


@pytest.mark.parametrize("level", [0, 1, 2])
def test_trip_costs_one_kernel_beside_its_body(level: int) -> None:
    """Beside the runtime's own, which sets the condition: values are computed in place, and none is copied."""
    exe, _ = compiled("counted", level=level)
    with exe:
        (body,) = exe.plan.bodies
        work = [command for _, command in body.work]
        assert not any(isinstance(command, Memcpy) for command in work)
        names = {body.ops[command.op].name for command in work}
        counting = {name for name in names if "_lt" in name}
        assert len(counting) == sum("_lt" in body.ops[command.op].name for command in work) == 1
        assert len(names - counting) <= 3, "linear, tanh and add"


def test_a_loop_beyond_its_limit_is_refused() -> None:
    exe, _ = compiled("counted", level=1, trip_limit=8)
    torch.manual_seed(0)
    _, (x, _) = MODELS["counted"]()
    with exe:
        for _ in range(4):
            with pytest.raises(InputError, match="has not ended after 8 trips"):
                exe(x.numpy(), np.array(9))
        assert exe(x.numpy(), np.array(8))[0] == 8
