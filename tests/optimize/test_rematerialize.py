"""Rematerialisation: what a backward pass computes again, and that a training step's results stay the same."""

from collections import Counter
from typing import Any

import pytest
import torch
import training_steps
from calling import place
from rewriting import counts, rewritten, run
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import nimblec
from nimblec.optimize.passes import rematerialize
from nimblec.optimize.pipeline import Runs, Setting
from nimblec.optimize.rewrites import REWRITES
from nimblec.training import entries
from nimblec.training.step import trace


def more_calls(monkeypatch: pytest.MonkeyPatch, *layers: nn.Module, least: int = 64) -> Counter[str]:
    """Return the calls that a training step of these layers makes again; its results are the same."""
    monkeypatch.setattr(rematerialize, "_LEAST_NBYTES", least)
    monkeypatch.setattr(entries, "trace", lambda *args, exported: trace(*args, exported=not exported))
    torch.manual_seed(0)
    model, batch = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)), training_steps.batch(0)
    model(batch[0])
    made = torch.optim.SGD(model.parameters(), 0.1)
    module, inputs = nimblec.training_step(model, nn.functional.cross_entropy, made, batch)["train"]
    placed = Runs(place(module, inputs), Setting(device="cpu"))(REWRITES)
    after = rewritten(placed.module, rematerialize.rematerialize)
    before, found = (run(graph, *tree_leaves(placed.args)) for graph in (placed.module, after))
    torch.testing.assert_close(found, before)
    return counts(after) - counts(placed.module)


def test_what_reads_only_kept_values_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again = more_calls(monkeypatch, nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3))
    assert again == {"gelu": 1}


@pytest.mark.parametrize("padding", [1, (-1, 2, 1, -2)])
def test_a_chain_is_computed_again_as_a_whole(monkeypatch: pytest.MonkeyPatch, padding: Any) -> None:
    again = more_calls(monkeypatch, nn.Conv2d(3, 4, 3), nn.SiLU(), nn.ReflectionPad2d(padding), nn.Conv2d(4, 4, 3))
    assert (again["silu"], again["reflection_pad2d"]) == (1, 1)


def test_a_norm_is_computed_again_where_generated_kernels_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.InstanceNorm2d(4, affine=True)
    again = more_calls(monkeypatch, nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.ReflectionPad2d(1), nn.Conv2d(4, 4, 3))
    assert (again["relu"], again["reflection_pad2d"], again["sub"]) == (2, 1, 2)
    for reader in (nn.Conv2d(4, 4, 3), nn.MaxPool2d(2)):
        assert not more_calls(monkeypatch, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), reader)


def test_what_the_backward_pass_does_not_read_is_not_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of ReLU reads its result alone: to compute that again, its argument would have to be kept."""
    assert not more_calls(monkeypatch, nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))


class Doubled(nn.Conv2d):
    """A convolution by twice its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        return functional.conv2d(x, self.weight * 2)


def test_what_is_computed_from_parameters_alone_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not more_calls(monkeypatch, nn.Conv2d(3, 4, 3), Doubled(4, 4, 3))


def test_random_numbers_and_small_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not more_calls(monkeypatch, nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 4, 3))
    assert not more_calls(monkeypatch, nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), least=1 << 20)
