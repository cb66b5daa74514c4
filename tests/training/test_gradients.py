"""Gradients on the CPU target of operators for which torch.onnx has none, beside PyTorch's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import nimblec
import nimblert
from nimblec.training.backward import decompositions
from nimblec.training.functions import OtherFunctions

Function = Callable[[Tensor], Tensor]

LINE, IMAGE, VOLUME = (2, 3, 10), (2, 3, 8, 9), (2, 2, 4, 6, 5)
ROWS = (5, 6)
WORDS, BAGS, ENDS = map(torch.tensor, ([0, 1, 4, 2], [0, 2], [0, 2, 4]))
interpolate = partial(functional.interpolate, mode="bilinear")


def sampled(x: Tensor, by: Tensor, *, align_corners: bool = False, **options: Any) -> Tensor:
    grid = by[:, :2, :4, :5].permute(0, 2, 3, 1)
    return functional.grid_sample(x, grid, align_corners=align_corners, **options)


FUNCTIONS: dict[str, tuple[tuple[int, ...], Function]] = {
    "adaptive mean, line": (LINE, lambda x: functional.adaptive_avg_pool1d(x, 4)),
    "adaptive mean": (IMAGE, lambda x: functional.adaptive_avg_pool2d(x, (4, 5))),
    "adaptive mean, larger": (IMAGE, lambda x: functional.adaptive_avg_pool2d(x, (16, 7))),
    "adaptive mean, equal parts": (IMAGE, lambda x: functional.adaptive_avg_pool2d(x, (2, 3))),
    "adaptive mean, volume": (VOLUME, lambda x: functional.adaptive_avg_pool3d(x, (3, 2, 4))),
    "adaptive maximum, line": (LINE, lambda x: functional.adaptive_max_pool1d(x, 4)),
    "adaptive maximum": (IMAGE, lambda x: functional.adaptive_max_pool2d(x, (3, 4))),
    "adaptive maximum, volume": (VOLUME, lambda x: functional.adaptive_max_pool3d(x, (3, 2, 4))),
    "mean": (IMAGE, lambda x: functional.avg_pool2d(x, 3, 2, 1)),
    "mean of what is inside": (IMAGE, lambda x: functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)),
    "mean, over the border": (IMAGE, lambda x: functional.avg_pool2d(x, (2, 4), 3, ceil_mode=True)),
    "mean by a divisor": (IMAGE, lambda x: functional.avg_pool2d(x, 2, divisor_override=3)),
    "mean, volume": (VOLUME, lambda x: functional.avg_pool3d(x, 2, 1, (1, 0, 1), count_include_pad=False)),
    "maximum": (IMAGE, lambda x: functional.max_pool2d(x, 3, 2, 1)),
    "maximum, volume": (VOLUME, lambda x: functional.max_pool3d(x, 2, 1)),
    "nearest, line": (LINE, lambda x: functional.interpolate(x, 15, mode="nearest")),
    "nearest": (IMAGE, lambda x: functional.interpolate(x, scale_factor=2, mode="nearest")),
    "nearest, smaller": (IMAGE, lambda x: functional.interpolate(x, (3, 11), mode="nearest-exact")),
    "nearest, volume": (VOLUME, lambda x: functional.interpolate(x, scale_factor=2, mode="nearest")),
    "linear": (LINE, lambda x: functional.interpolate(x, 15, mode="linear")),
    "bilinear": (IMAGE, lambda x: interpolate(x, scale_factor=(2, 1.5))),
    "bilinear, corners": (IMAGE, lambda x: interpolate(x, (5, 13), align_corners=True)),
    "bilinear, smooth": (IMAGE, lambda x: interpolate(x, (5, 4), antialias=True)),
    "trilinear": (VOLUME, lambda x: functional.interpolate(x, (5, 6, 9), mode="trilinear", align_corners=True)),
    "bicubic": (IMAGE, lambda x: functional.interpolate(x, (13, 5), mode="bicubic")),
    "bicubic, smooth": (IMAGE, lambda x: functional.interpolate(x, (4, 5), mode="bicubic", antialias=True)),
    "diagonal": (IMAGE, lambda x: x.diagonal(1, 2, 3)),
    "diagonal, put": (IMAGE, lambda x: x.sin().diagonal_scatter(x[0, :, :, 0].expand(2, 3, 8), 0, 2, 3)),
    "masked": (LINE, lambda x: torch.zeros(2, 3, 10).masked_scatter(torch.arange(10) % 3 == 0, x.exp())),
    "border, line": (LINE, lambda x: functional.pad(x, (2, 1), mode="replicate")),
    "border": (IMAGE, lambda x: functional.pad(x, (2, -1, 0, 3), mode="replicate")),
    "border, volume": (VOLUME, lambda x: functional.pad(x, (2, 1, 0, 3, 1, 1), mode="replicate")),
    "mirror, line": (LINE, lambda x: functional.pad(x, (2, 1), mode="reflect")),
    "mirror": (IMAGE, lambda x: functional.pad(x, (2, -1, 0, 3), mode="reflect")),
    "mirror, volume": (VOLUME, lambda x: functional.pad(x, (2, 1, 0, 3, 1, 1), mode="reflect")),
    "grid": (IMAGE, lambda x: sampled(x, x)),
    "grid, corners": (IMAGE, lambda x: sampled(x, x, padding_mode="border", align_corners=True)),
    "grid, nearest": (IMAGE, lambda x: sampled(x, x.detach(), mode="nearest", padding_mode="reflection")),
    "sums of bags": (ROWS, lambda x: functional.embedding_bag(WORDS, x, BAGS, mode="sum", per_sample_weights=x[:4, 0])),
    "means of bags": (ROWS, lambda x: functional.embedding_bag(WORDS, x, BAGS, padding_idx=2)),
    "bags with an end": (ROWS, lambda x: functional.embedding_bag(WORDS, x, ENDS, include_last_offset=True)),
    "products of rows": (ROWS, lambda x: functional.bilinear(x, x.sin(), x[:2, :, None].expand(2, 6, 6))),
    "norm of weights": (ROWS, lambda x: torch._weight_norm(x, x[:, :1].exp(), 0)),
    "norm of columns": (IMAGE, lambda x: torch._weight_norm(x, x[:1, :, :1, :1].exp(), 1)),
    "running product": (ROWS, lambda x: x.cumprod(0)),
    "shrunk, hard": (ROWS, lambda x: functional.hardshrink(x, 0.3)),
    "shrunk, soft": (ROWS, lambda x: functional.softshrink(x, 0.3)),
    "distances": (LINE, lambda x: torch.cdist(x, x.flip(1)[:, :2].sin())),
    "distances, in blocks": (LINE, lambda x: torch.cdist(x, x.flip(1)[:, :2].sin(), p=1.0)),
    "distances, cubic": (LINE, lambda x: torch.cdist(x, x.flip(1)[:, :2].sin(), p=3.0)),
    "distances, largest": (LINE, lambda x: torch.cdist(x, x.flip(1)[:, :2].sin(), p=torch.inf)),
}


def drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def weighed(y: Tensor) -> Tensor:
    """Return a sum in which each element of a result counts otherwise."""
    return (y * torch.linspace(0.5, 1.5, y.numel()).reshape(y.shape)).sum()


def gradient(function: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(weighed(function(x)), [x])
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_is_pytorchs(name: str) -> None:
    shape, function = FUNCTIONS[name]
    x = drawn(shape)
    table = decompositions(exported=True)
    traced = partial(gradient, function)
    with OtherFunctions(exported=True):
        graph = make_fx(traced, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    backward = {str(node.target) for node in graph.graph.nodes if "backward" in str(node.target)}
    assert not backward - {"aten.diagonal_backward.default"}
    other = drawn(shape).flip(-1)
    assert torch.allclose(graph(other), gradient(function, other), rtol=1e-5, atol=1e-6)


def test_on_a_gpu_the_gradient_of_a_mirror_is_one_call() -> None:
    traced = partial(gradient, lambda x: functional.pad(x, (2, 1, 1, 2), mode="reflect"))
    graph = make_fx(traced, decomposition_table=decompositions(exported=False), tracing_mode="fake")(drawn(IMAGE))
    assert not [node for node in graph.graph.nodes if "masked_index" in str(node.target)]
    assert [node for node in graph.graph.nodes if node.target is torch.ops.aten.reflection_pad2d_backward.default]


class All(nn.Module):
    """All functions, each of a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.ParameterList(drawn(shape) for shape, _ in FUNCTIONS.values())

    def forward(self, scale: Tensor) -> Tensor:
        """Return the weighed sum of each result, scaled."""
        pairs = zip(self.given, FUNCTIONS.values(), strict=True)
        return torch.stack([weighed(function(x * scale)) for x, (_, function) in pairs])


def total(found: Tensor, factors: Tensor) -> Tensor:
    return (found * factors).sum()


def test_a_plan_trains_them_as_pytorch_does() -> None:
    model, eager = All(), All()
    batch: Any = torch.tensor(1.0), torch.linspace(0.1, 0.2, len(FUNCTIONS))
    step = nimblec.training_step(model, total, torch.optim.SGD(model.parameters(), 0.1), batch)
    optimizer = torch.optim.SGD(eager.parameters(), 0.1)
    with nimblert.load(nimblec.compile(step, target="cpu")) as exe:
        for _ in range(2):
            found = exe(*(tensor.numpy() for tensor in batch), entry="train")
            optimizer.zero_grad()
            value = total(eager(batch[0]), batch[1])
            value.backward()
            optimizer.step()
            assert np.allclose(found, value.detach(), rtol=1e-5)
        assert np.allclose(exe(batch[0].numpy(), entry="evaluate"), eager(batch[0]).detach(), rtol=1e-4)
        for number, (name, parameter) in enumerate(zip(FUNCTIONS, eager.given, strict=True)):
            assert np.allclose(exe.state[f"model.given.{number}"], parameter.detach(), atol=1e-5), name
