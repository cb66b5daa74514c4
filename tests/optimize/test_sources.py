"""What a rewrite leaves comes from wherever that did which it does the work of."""

from collections.abc import Callable

import pytest
import torch
from rewriting import rewritten
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from nimblec.graph.simplify import simplify
from nimblec.optimize.passes.batch_norm import fold_batch_norm
from nimblec.optimize.passes.inductor import ops
from nimblec.optimize.passes.partition import extract, partition, replace
from nimblec.optimize.passes.subexpressions import merge_equal_calls
from nimblec.optimize.passes.written_activations import recognize_activations
from nimblec.pytorch.aten_graph import trace

Pass = Callable[[fx.GraphModule], None]


class Written(nn.Module):
    """A GELU of several calls."""

    def forward(self, x: Tensor) -> Tensor:
        """Map any shape to the same."""
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def block() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Identity(), Written(), nn.Flatten())
    return model.eval()


def sources(module: fx.GraphModule) -> dict[str, str]:
    """Return the sources by the call's name; of equal names the last."""
    calls = [node for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    return {node.target._opname: node.meta["source"] for node in calls}


@pytest.mark.parametrize(
    ("passes", "wanted"),
    [
        ((), {"convolution": "0", "erf": "3", "reshape": "4"}),
        ((simplify, fold_batch_norm), {"convolution": "0 + 1", "erf": "3", "reshape": "4"}),
        ((simplify, recognize_activations), {"convolution": "0", "gelu": "3", "reshape": "4"}),
    ],
)
def test_a_call_that_replaces_others_has_their_sources(passes: tuple[Pass, ...], wanted: dict[str, str]) -> None:
    module = trace(block(), (torch.randn(1, 2, 6, 6),)).module
    assert wanted.items() <= sources(rewritten(module, *passes)).items()


def test_a_call_that_stands_for_equal_ones_is_of_all() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Tanh(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) * self.right(x).flip(0)

    module = trace(Twice(), (torch.randn(4),)).module
    assert sources(rewritten(module, merge_equal_calls))["tanh"] == "left + right"


def test_a_region_is_of_all_its_calls() -> None:
    module = rewritten(trace(block(), (torch.randn(1, 2, 6, 6),)).module, simplify)
    replace(module, ops([extract(region) for region in partition(module)]))
    (found,) = (source for name, source in sources(module).items() if name.startswith("fused"))
    assert found == "1 + 3"
