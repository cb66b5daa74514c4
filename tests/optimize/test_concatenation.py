"""Concatenations whose parts our kernels write where they belong."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rewriting import assert_same, counts, optimize, random_half, record, rewritten
from torch import Tensor, fx
from torch.nn import functional

from nimblec.kernels.products.concatenation import concatenate_in_place
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling
from nimblec.kernels.products.gemm_match import requests
from nimblec.kernels.products.gemm_rewrite import use_triton_kernels
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.siblings import join_siblings
from nimblec.optimize.passes.channels_last import propagate_channels_last
from nimblec.optimize.passes.partition import partition

if TYPE_CHECKING:
    from nimblec.kernels.products.gemm_match import ProductRequest

TILING = Tiling(block_m=16, block_n=16, block_k=32, split_k=2)


IMAGES = random_half(2, 16, 6, 5, seed=0).contiguous(memory_format=torch.channels_last)
BIAS = random_half(64, seed=2)


def _conv(x: Tensor, out: int, size: int = 1, seed: int = 3) -> Tensor:
    weight = random_half(out, x.shape[1], size, size, seed=seed) / (x.shape[1] * size * size) ** 0.5
    return functional.conv2d(x, weight, BIAS[:out], padding=size // 2)


def _norm(x: Tensor) -> Tensor:
    scale = (torch.arange(x.shape[1]) % 3 + 1).half()
    return functional.batch_norm(x, scale, scale, scale / 4, scale.neg())


def _branches(x: Tensor, *channels: int) -> list[Tensor]:
    return [torch.relu(_conv(x, out, size=2 * (n % 2) + 1)) for n, out in enumerate(channels)]


def _inception(x: Tensor) -> Tensor:
    return _conv(torch.cat(_branches(x, 8, 24, 16), 1), 8)


def _nested(x: Tensor) -> Tensor:
    first, second, third, fourth = _branches(x, 8, 24, 16, 8)
    return torch.cat([first, torch.cat([second, torch.cat([third, fourth], 1)], 1)], -3)


def _with_residual(x: Tensor) -> Tensor:
    x = _conv(x, 16)
    return torch.cat([_conv(x, 16, 3) + x, _conv(x, 8)], 1).neg()


def _after_another(x: Tensor) -> Tensor:
    x = torch.cat(_branches(x, 8, 16, 8, 8), 1)
    return _of_dense_block(x) + functional.avg_pool2d(_conv(x, 64), 2)


def _dense_block(x: Tensor) -> Tensor:
    return _of_dense_block(functional.max_pool2d(_conv(x, 16), 3, 1, 1))


def _of_dense_block(x: Tensor) -> Tensor:
    parts = [x]
    for n in range(3):
        bottleneck = torch.relu(_conv(torch.relu(_norm(torch.cat(parts, 1))), 32, seed=n))
        parts.append(_conv(bottleneck, 8, 3, seed=n))
    return functional.avg_pool2d(torch.relu(_norm(torch.cat(parts, 1))), 2)


def _with_siblings(x: Tensor) -> Tensor:
    """Apply three convolutions to the same images, as in GoogLeNet; the first begins the concatenation."""
    x = functional.max_pool2d(_conv(x, 16), 3, 1, 1)
    first, second, third = (torch.relu(_conv(x, out, seed=out)) for out in (8, 16, 24))
    pooled = functional.max_pool2d(x, 3, 1, 1)
    return torch.cat([first, _conv(second, 24, 3), _conv(third, 8, 3), _conv(pooled, 8)], 1).neg()


def _aggregated(x: Tensor) -> Tensor:
    """Concatenate a chain of convolutions, as in VoVNet, the last one depthwise, as in GhostNet; one is pooled too."""
    first = _conv(x, 16)
    second = torch.relu(_conv(first, 16, 3))
    third = functional.conv2d(second, random_half(16, 1, 3, 3, seed=4) / 3, BIAS[:16], padding=1, groups=16)
    pooled = functional.max_pool2d(second, 2).repeat(1, 3, 1, 1)
    return functional.avg_pool2d(torch.cat([first, second, third], 1), 2) + pooled


def _with_identity(x: Tensor) -> Tensor:
    """Add what is concatenated to what is computed from it, as in HGNet and Inception-ResNet."""
    whole = torch.cat(_branches(x, 8, 24), 1)
    first = torch.relu(_conv(torch.cat(_branches(whole, 8, 8), 1), 32) + whole)
    return torch.cat([first, torch.relu(_conv(first, 32, 3) + first)], 1).neg()


def _last_of_a_split(x: Tensor) -> Tensor:
    """Send half of a result another way, and pool it there, as in CSPNet."""
    both = _conv(x, 32)
    half = both[:, 16:]
    pooled = functional.max_pool2d(both[:, :16], 3, 1, 1)
    return torch.cat([half, _conv(x, 8)], 1).neg() + torch.cat([pooled, x[:, :8]], 1)


TAKEN_APART: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, int]]] = {
    "inception": (_inception, {"convolution": 1, "convolution_into": 3, "joined": 1}),
    "nested": (_nested, {"convolution_into": 4, "joined": 1}),
    "with a residual": (_with_residual, {"convolution": 1, "convolution_into": 2, "joined": 1}),
    "dense block": (_dense_block, {"convolution": 4, "convolution_into": 3, "joined": 4, "place": 1}),
    "with siblings": (_with_siblings, {"convolution": 1, "convolution_into": 4, "joined": 1}),
    "with an identity": (_with_identity, {"convolution_into": 6, "joined": 3}),
    "aggregated": (_aggregated, {"convolution_into": 2, "depthwise_into": 1, "joined": 1}),
    "after another": (_after_another, {"convolution": 4, "convolution_into": 7, "joined": 5, "place": 1}),
}


def _graph(function: Callable[[Tensor], Any], x: Tensor = IMAGES) -> fx.GraphModule:
    module = optimize(record(function, x), device="cuda")
    propagate_channels_last(module)
    return module


def _placed(before: fx.GraphModule) -> fx.GraphModule:
    return rewritten(before, join_siblings, concatenate_in_place)


@pytest.mark.parametrize("name", TAKEN_APART)
def test_parts_are_written_where_they_belong(name: str) -> None:
    function, wanted = TAKEN_APART[name]
    before = _graph(function)
    tilings = {"depthwise": DepthwiseTiling(block_m=4, block_c=16, num_warps=2)}
    after = rewritten(_placed(before), lambda m: use_triton_kernels(m, lambda r: tilings.get(r.kind, TILING)))
    assert "cat" not in counts(after)
    for op in ("convolution", "convolution_into", "depthwise_into", "joined", "place"):
        assert counts(after).get(op, 0) == wanted.get(op, 0), counts(after)
    assert_same(before, after, IMAGES, rtol=4e-3)


@pytest.mark.parametrize("name", TAKEN_APART)
def test_each_part_is_copied_where_the_framework_is_faster(name: str) -> None:
    before = _graph(TAKEN_APART[name][0])
    after = rewritten(_placed(before), lambda module: use_triton_kernels(module, lambda _: None))
    assert counts(after)["place"] == len({part for joined in _calls(after, "joined") for part in joined.args[1]})
    assert_same(before, after, IMAGES, rtol=1e-3)


def test_a_choice_for_each_part() -> None:
    def choose(request: "ProductRequest") -> Tiling | None:
        return TILING if request.shape.out_channels == 24 else None

    before = _graph(_inception)
    after = rewritten(_placed(before), lambda module: use_triton_kernels(module, choose))
    assert (counts(after)["convolution_into"], counts(after)["place"]) == (1, 2)
    assert_same(before, after, IMAGES, rtol=4e-3)


def test_what_is_read_from_part_of_the_channels_needs_no_copy() -> None:
    _, *asked = requests(_placed(_graph(_dense_block)))
    assert [r.shape.pixel_stride for r in asked] == [40, 32, 40, 32, 40, 32]
    assert [r.shape.out_stride for r in asked] == [None, 40, None, 40, None, 40]
    assert [r.before is not None for r in asked] == [True, False, True, False, True, False]


def test_the_last_channels_of_a_result_are_a_part_like_others() -> None:
    before = _graph(_last_of_a_split)
    after = rewritten(_placed(before), lambda module: use_triton_kernels(module, lambda _: TILING))
    assert {name: counts(after).get(name, 0) for name in ("cat", "convolution_into", "place")} == {
        "cat": 1,
        "convolution_into": 2,
        "place": 0,
    }
    assert_same(before, after, IMAGES, rtol=4e-3)


@pytest.mark.parametrize("rows", [False, True])
def test_concatenation_view_keeps_layout(rows: bool) -> None:
    """The concatenation has come to lie in the memory of a longer one, and so has the view."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third = _branches(x, 8, 8, 16)
        view = torch.cat([first, second], 1).permute(0, 2, 3, 1)
        return view.reshape(-1, 16) if rows else view, torch.cat([first, second, third], 1).neg()

    before = _graph(function)
    after = rewritten(before, concatenate_in_place)
    assert counts(after)["joined"] == 2
    assert_same(before, after, IMAGES, rtol=4e-3)


def test_generated_kernels_read_the_whole() -> None:
    after = rewritten(_placed(_graph(_dense_block)), lambda module: use_triton_kernels(module, lambda _: TILING))
    names = [{str(call.target._schema.name) for call in region} for region in partition(after)]
    assert names
    assert not any(name.startswith("nimblec") for calls in names for name in calls)


def _used_elsewhere(x: Tensor) -> Tensor:
    first, second = _branches(x, 8, 16)
    return torch.cat([first, second], 1).mean() + second.sum()


def _twice_the_same(x: Tensor) -> Tensor:
    (part,) = _branches(x, 8)
    return torch.cat([part, part], 1)


STAY: dict[str, Callable[[Tensor], Tensor]] = {
    "used elsewhere": _used_elsewhere,
    "with something else": lambda x: torch.cat([*_branches(x, 8, 16), functional.max_pool2d(x, 3, 1, 1)], 1),
    "with gaps": lambda x: torch.cat(_branches(x, 7, 16), 1),
    "by rows": lambda x: torch.cat(_branches(x, 8, 8), 2),
    "twice the same": _twice_the_same,
    "of single pixels": lambda x: torch.cat(_branches(x.mean((2, 3), keepdim=True), 8, 8), 1),
}


@pytest.mark.parametrize("function", STAY.values(), ids=STAY)
def test_what_would_spare_no_copy_stays(function: Callable[[Tensor], Tensor]) -> None:
    before = _graph(function)
    assert counts(before)["cat"] == 1
    assert counts(_placed(before)) == counts(before)


def _calls(module: fx.GraphModule, name: str) -> list[fx.Node]:
    return [n for n in module.graph.nodes if getattr(n.target, "_opname", "") == name]


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (0, 8, 1, 1), (2, 0, 4, 4)])
def test_concatenations_of_nothing_stay(shape: tuple[int, ...]) -> None:
    def model(x: Tensor) -> Tensor:
        parts = [part.contiguous(memory_format=torch.channels_last) for part in (torch.relu(x), x)]
        return torch.cat(parts, 1)

    before = record(model, torch.empty(shape))
    assert rewritten(before, concatenate_in_place).code == before.code
