"""Loops and branches become calls of one graph, whose bodies are optimised as graphs of their own."""

import pytest
import torch
from calling import place
from control_models import MODELS
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from nimblec.graph import control
from nimblec.graph.views import is_view
from nimblec.optimize.variants import variants
from nimblec.plan.timing_cache import TimingCache
from nimblec.pytorch.flat import flattened
from nimblec.pytorch.model import TorchModel
from nimblert.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def placed(name: str) -> tuple[TorchModel, list[Tensor]]:
    """Return a model on the CPU, and what it gives."""
    torch.manual_seed(0)
    module, args = MODELS[name]()
    with torch.no_grad():
        return place(module.eval(), args), pytree.tree_leaves(module(*args))


def run(model: TorchModel) -> list[Tensor]:
    with torch.no_grad():
        results: list[Tensor] = pytree.tree_leaves(model.run(lambda _: None))
    return results


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_with_control_flow_computes_what_the_module_does(name: str) -> None:
    model, expected = placed(name)
    torch.testing.assert_close(run(flattened(model)), expected)


def made_at(level: int, model: TorchModel) -> TorchModel:
    """Return the graph that a level makes of a model with loops or branches."""
    *_, variant = variants(model, level, None, TimingCache(None))
    return variant.make()


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_bodies_are_optimised_and_write_in_place(name: str, level: int) -> None:
    model, expected = placed(name)
    made = made_at(level, model)
    torch.testing.assert_close(run(made), expected)
    for _, target in control.calls(made.module):
        for body in target.bodies:
            assert len(body.graph.output_node().args[0]) == target.extra, "results are written into their slots"


@pytest.mark.parametrize(("level", "count"), [(0, 4), (1, 3)])
def test_trip_counts_and_compares_by_one_call(level: int, count: int) -> None:
    """At -O0 linear, tanh and add follow, at -O1 one region computes the last two."""
    made = made_at(level, placed("counted")[0])
    ((_, loop),) = control.calls(made.module)
    calls = [node for node in loop.bodies[0].graph.nodes if isinstance(node.target, OpOverload) and not is_view(node)]
    assert len([node for node in calls if node.target is not torch.ops.aten.copy_.default]) == count
    assert sum(node.target.namespace == "nimblec" and "lt" in node.target._schema.name for node in calls) == 1


@pytest.mark.parametrize("level", [0, 1])
def test_model_with_loop_keeps_its_state(level: int) -> None:
    model, (expected,) = placed("totalled")
    made = made_at(level, model)
    model.module.total.zero_()
    for runs in (1, 2):
        run(made)
        torch.testing.assert_close(model.module.total, runs * expected)


def test_a_loop_beyond_its_limit_is_refused() -> None:
    model, _ = placed("counted")
    token = control.trip_limit.set(4)
    try:
        flat = flattened(model)
    finally:
        control.trip_limit.reset(token)
    with pytest.raises(InputError, match="has not ended after 4 trips"):
        run(flat)
