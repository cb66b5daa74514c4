"""Loops and branches become calls of one graph, whose bodies are optimised as graphs of their own."""

import pytest
import torch
from control_models import MODELS
from torch import Tensor
from torch.utils import _pytree as pytree

from nimblec.graph import control
from nimblec.optimize.variants import variants
from nimblec.plan.timing_cache import TimingCache
from nimblec.pytorch.flat import flattened
from nimblec.pytorch.model import TorchModel, place
from nimblert.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def placed(name: str) -> tuple[TorchModel, list[Tensor]]:
    """Return a model on the CPU, and what it gives."""
    torch.manual_seed(0)
    module, args = MODELS[name]()
    with torch.no_grad():
        return place(module.eval(), args, device="cpu"), pytree.tree_leaves(module(*args))


def run(model: TorchModel) -> list[Tensor]:
    with torch.no_grad():
        results: list[Tensor] = pytree.tree_leaves(model.run(lambda _: None))
    return results


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_with_control_flow_computes_what_the_module_does(name: str) -> None:
    model, expected = placed(name)
    torch.testing.assert_close(run(flattened(model)), expected)


@pytest.mark.parametrize("name", MODELS)
def test_bodies_are_optimised_and_write_in_place(name: str) -> None:
    model, expected = placed(name)
    (variant,) = variants(model, 1, None, TimingCache(None))
    made = variant.make()
    torch.testing.assert_close(run(made), expected)
    for _, target in control.calls(made.module):
        for body in target.bodies:
            assert len(body.graph.output_node().args[0]) == target.extra, "results are written into their slots"


def test_a_loop_beyond_its_limit_is_refused() -> None:
    model, _ = placed("counted")
    token = control.trip_limit.set(4)
    try:
        flat = flattened(model)
    finally:
        control.trip_limit.reset(token)
    with pytest.raises(InputError, match="has not ended after 4 trips"):
        run(flat)
