"""Each pass stands where it does for a reason: elsewhere something named gets worse."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import chain, dropwhile, pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from rewriting import counts, record
from torch import Tensor, fx, nn

from nimblec.graph.outputs import keep_outputs
from nimblec.graph.rewriter import Rewriter, bound, fake
from nimblec.graph.simplify import simplify
from nimblec.graph.views import is_channels_last
from nimblec.graph.vocabulary import ATTENTION
from nimblec.kernels.gpu import SM_90
from nimblec.kernels.launch import ops
from nimblec.optimize.o2 import KERNELS, TRITON, first
from nimblec.optimize.passes import aligned_weights
from nimblec.optimize.passes.activations import fuse_activations
from nimblec.optimize.passes.aligned_weights import align_weights
from nimblec.optimize.passes.attention import fuse_attention
from nimblec.optimize.passes.attention_masks import canonicalize_masks
from nimblec.optimize.passes.batch_norm import fold_batch_norm
from nimblec.optimize.passes.branches import join_branches
from nimblec.optimize.passes.cast import cast
from nimblec.optimize.passes.channels_last import lay_contiguous, lay_float32_channels_last, propagate_channels_last
from nimblec.optimize.passes.convolutions import fuse_convolutions
from nimblec.optimize.passes.copies import drop_copies
from nimblec.optimize.passes.folding import fill_empty, fold_constants
from nimblec.optimize.passes.linears import join_linears
from nimblec.optimize.passes.numbers import inline_numbers
from nimblec.optimize.passes.one_axis import convolve_as_images
from nimblec.optimize.passes.pointwise import linear_convolutions
from nimblec.optimize.passes.shared_matrix import join_batches
from nimblec.optimize.passes.subexpressions import merge_equal_calls
from nimblec.optimize.passes.transposed import block_transposed_convolutions
from nimblec.optimize.passes.written_activations import recognize_activations
from nimblec.optimize.pipeline import Pass, Phase, Pipeline, Setting, Step, calls, check_order
from nimblec.optimize.rewrites import FUSED_REGIONS, REWRITES
from nimblec.pytorch.aten_graph import trace

Rewrite = Callable[..., object]

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def phases(setting: Setting) -> list[Pass]:
    """Return the passes that run in a setting, in their order."""
    return list(chain.from_iterable(phase.passes for phase in REWRITES.phases if phase.when(setting)))


def moved(run: Rewrite, *, to: Rewrite, passes: list[Pass]) -> list[Pass]:
    """Return the passes with the last ``run`` where the first ``to`` is: before it if it came after, else after it."""
    names = [each.run for each in passes]
    source = len(names) - 1 - names[::-1].index(run)
    target = names.index(to)
    rest = [*passes[:source], *passes[source + 1 :]]
    return [*rest[:target], passes[source], *rest[target:]]


def rewritten(graph: fx.GraphModule, passes: list[Pass], setting: Setting) -> fx.GraphModule:
    pipeline = Pipeline()
    pipeline.phases = (Phase(name="moved", passes=tuple(passes)),)
    return pipeline(graph, setting)


def worse(
    graph: fx.GraphModule, run: Rewrite, to: Rewrite, *, dtype: torch.dtype | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graph as REWRITES leave it, and with ``run`` moved to where ``to`` stands, which must be refused."""
    setting = Setting(dtype=dtype)
    passes = moved(run, to=to, passes=phases(setting))
    with pytest.raises(ValueError, match=r"stands before \w+, which it needs"):
        check_order(passes)
    return REWRITES(graph, setting), rewritten(graph, passes, setting)


def test_zeros_are_folded_once_they_are_filled() -> None:
    graph = record(lambda x: x + torch.exp(x.new_empty(4)), normal(4))
    right, wrong = worse(graph, fold_constants, fill_empty)
    assert (calls(right), calls(wrong)) == (1, 3)


def test_numbers_are_inlined_once_they_are_folded() -> None:
    graph = record(lambda x: x * torch.exp(x.new_empty(())), normal(4))
    right, wrong = worse(graph, inline_numbers, fold_constants)
    assert [isinstance(multiplied(module).args[1], float) for module in (right, wrong)] == [True, False]


def multiplied(module: fx.GraphModule) -> fx.Node:
    return only(module, torch.ops.aten.mul.Tensor)


def only(module: fx.GraphModule, target: object) -> fx.Node:
    (node,) = (node for node in module.graph.nodes if node.target is target)
    return node


def test_factors_of_a_gelu_go_into_the_next_linear_if_norms_are_folded_first() -> None:
    weight, bias = normal(4, 8), normal(4)
    graph = record(lambda x: F.linear(x * (1 + torch.erf(x / math.sqrt(2))) * 0.5, weight, bias), normal(3, 8))
    right, wrong = worse(graph, fold_batch_norm, recognize_activations)
    assert counts(right)["gelu"] == 1
    assert counts(wrong)["gelu"] == 0
    assert calls(wrong) > calls(right)


def test_a_gelu_of_equal_calls_is_found_once_they_are_one() -> None:
    graph = record(lambda x: torch.sin(x) * (1 + torch.erf(torch.sin(x) / math.sqrt(2))) * 0.5, normal(3, 8))
    right, wrong = worse(graph, recognize_activations, merge_equal_calls)
    assert counts(right)["gelu"] == 1
    assert counts(wrong)["gelu"] == 0


def convolutional(*parts: nn.Module, size: int = 8, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    torch.manual_seed(0)
    return trace(nn.Sequential(*parts).eval().to(dtype), (torch.randn(1, 4, size, size, dtype=dtype),)).module


def test_a_norm_between_convolution_and_relu_keeps_them_apart() -> None:
    graph = convolutional(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    right, wrong = worse(graph, fuse_convolutions, fold_batch_norm)
    assert (calls(right), calls(wrong)) == (1, 2)
    assert counts(right)["cudnn_convolution_relu"] == 1


def test_a_norm_keeps_an_activation_from_a_convolution_over_one_axis() -> None:
    parts = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU()).eval()
    right, wrong = worse(trace(parts, (torch.randn(1, 4, 9),)).module, convolve_as_images, fold_batch_norm)
    assert counts(right)["cudnn_convolution_relu"] == 1
    assert counts(wrong)["cudnn_convolution_relu"] == 0


def test_images_of_one_row_have_a_layout() -> None:
    graph = trace(nn.Conv1d(4, 4, 3).eval().half(), (torch.randn(1, 4, 9).half(),)).module
    found = worse(graph, propagate_channels_last, convolve_as_images)
    assert [is_channels_last(fake(only(each, torch.ops.aten.convolution.default))) for each in found] == [True, False]


class Branches(nn.Module):
    """RepVGG's block."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.b = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images."""
        return self.a(x) + self.b(x)


def test_branches_are_one_convolution_once_their_norms_are_folded() -> None:
    right, wrong = worse(convolutional(Branches()), join_branches, fold_batch_norm)
    assert (counts(right)["convolution"], counts(wrong)["convolution"]) == (1, 2)


def test_the_bias_of_a_batched_product_is_folded_once_it_is_one_product() -> None:
    matrix, bias = normal(8, 4), normal(4)
    graph = record(lambda x: torch.bmm(x, torch.stack([matrix] * 3)) + bias, normal(3, 5, 8))
    right, wrong = worse(graph, fold_batch_norm, join_batches)
    assert (calls(right), calls(wrong)) == (1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 4 + torch.zeros(5, 5), -1), v)


def test_masks_of_written_out_attention_are_known_once_it_is_a_call() -> None:
    graph = record(attention, *(normal(2, 5, 16) for _ in range(3)))
    right, wrong = worse(graph, canonicalize_masks, fuse_attention)
    masks = [bound(only(module, ATTENTION))["attn_mask"] for module in (right, wrong)]
    assert [mask is None for mask in masks] == [True, False]


def test_attention_reads_what_a_copy_was_made_of() -> None:
    def swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.transpose(0, 1).contiguous(), k, v).sum(1)

    graph = record(swapped, normal(5, 2, 16), normal(2, 5, 16), normal(2, 5, 16))
    right, wrong = worse(graph, drop_copies, fuse_attention)
    assert (counts(right)["clone"], counts(wrong)["clone"]) == (0, 1)


def test_views_of_attention_are_joined_with_those_around_it() -> None:
    graph = record(lambda *qkv: attention(*qkv).reshape(2, 80), *(normal(2, 5, 16) for _ in range(3)))
    right, wrong = worse(graph, simplify, fuse_attention)
    assert counts(right)["reshape"] < counts(wrong)["reshape"]


def test_convolutions_of_one_pixel_are_products_before_they_are_fused() -> None:
    graph = convolutional(nn.Conv2d(4, 8, 1), nn.ReLU(), size=1)
    right, wrong = worse(graph, fuse_convolutions, linear_convolutions)
    assert counts(right)["_addmm_activation"] == 1
    assert counts(wrong)["_addmm_activation"] == 0


def test_blocks_of_pixels_lie_as_the_image_does() -> None:
    graph = convolutional(nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 4, 3), dtype=torch.float16)
    right, wrong = worse(graph, block_transposed_convolutions, propagate_channels_last)
    assert (counts(right)["clone"], counts(wrong)["clone"]) == (3, 4)


def test_activations_of_joined_linears_would_read_slices() -> None:
    weights = [(normal(8, 8), normal(8)) for _ in range(2)]
    graph = record(lambda x: [torch.relu(F.linear(x, *each)) for each in weights], normal(3, 8))
    right, wrong = worse(graph, join_linears, fuse_activations)
    assert (calls(right), calls(wrong)) == (2, 3)


def test_joined_weights_may_need_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_weights, "LARGE", 1)
    weights = [(normal(4, 8).half(), normal(4).half()) for _ in range(2)]
    graph = record(lambda x: [F.linear(x, *each) for each in weights], normal(3, 8).half())
    right, wrong = worse(graph, align_weights, join_linears)
    widths = [fake(only(module, torch.ops.aten.addmm.default)).shape[1] for module in (right, wrong)]
    assert widths == [8, 16]


def test_a_padded_product_keeps_its_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_weights, "LARGE", 1)
    weight, bias = normal(7, 8).half(), normal(7).half()
    graph = record(lambda x: torch.relu(F.linear(x, weight, bias)), normal(3, 8).half())
    right, wrong = worse(graph, align_weights, fuse_activations)
    assert counts(right)["_addmm_activation"] == 1
    assert counts(wrong)["_addmm_activation"] == 0


class Steps(nn.Module):
    """A recurrent network whose first states are linears of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.cell, self.lstm = nn.Linear(8, 6), nn.Linear(8, 6), nn.LSTM(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Map (steps, batch, 8) to (steps, batch, 6)."""
        states = (self.hidden(x[0]).unsqueeze(0), self.cell(x[0]).unsqueeze(0))
        return self.lstm(x, states)[0]


def test_slices_of_joined_linears_are_copied_for_calls_that_refuse_them() -> None:
    torch.manual_seed(0)
    graph = trace(Steps().eval(), (torch.randn(5, 3, 8),)).module
    right, wrong = worse(graph, lay_contiguous, join_linears)
    states = [bound(only(module, torch.ops.aten.lstm.input))["hx"] for module in (right, wrong)]
    assert [all(fake(state).is_contiguous() for state in pair) for pair in states] == [True, False]


def test_outputs_that_were_merged_are_separated_last() -> None:
    graph = record(lambda x: (x * 2, x * 2), normal(4))
    right, wrong = worse(graph, keep_outputs, merge_equal_calls)
    outputs = [module.graph.output_node().args[0] for module in (right, wrong)]
    assert [len(set(nodes)) for nodes in outputs] == [2, 1]


def test_weights_are_rounded_once_if_norms_are_folded_before_the_cast() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_var.uniform_(0.5, 2)
    graph = convolutional(nn.Conv2d(4, 4, 3, bias=False), norm)
    half = Setting(dtype=torch.float16)
    cast_first = list(dropwhile(lambda each: each.run is not cast, phases(half)))
    with pytest.raises(ValueError, match="cast stands before"):
        check_order(cast_first)
    exact, right, wrong = (
        weight(module)
        for module in (REWRITES(graph, Setting()), REWRITES(graph, half), rewritten(graph, cast_first, half))
    )
    assert torch.equal(right, exact.half())
    assert not torch.equal(wrong, exact.half())


def weight(module: fx.GraphModule) -> Tensor:
    value = Rewriter(module).value(only(module, torch.ops.aten.convolution.default).args[1])
    assert value is not None
    return value


def with_kernels(graph: fx.GraphModule, passes: list[Pass]) -> fx.GraphModule:
    """Return a graph as REWRITES leave it, with Triton kernels by these passes."""
    setting = Setting(use=first(SM_90))
    return rewritten(REWRITES(graph, setting), passes, setting)


def triton(module: fx.GraphModule) -> Counter[str]:
    """Count the calls of each op of a Triton kernel."""
    return Counter(node.target._schema.name for node in module.graph.nodes if node.target in ops())


def test_triton_kernels_serve_images_that_lie_channels_last() -> None:
    graph = convolutional(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    passes = list(KERNELS.passes)
    wrong = moved(lay_float32_channels_last, to=passes[-1].run, passes=passes)
    with pytest.raises(ValueError, match="stands before lay_float32_channels_last"):
        check_order(wrong)
    assert triton(with_kernels(graph, passes)).total() == 2
    assert triton(with_kernels(graph, wrong)).total() == 0


def test_norms_go_into_products_that_are_triton_kernels() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
    graph = trace(nn.Sequential(*layers).eval().half(), (torch.randn(32, 64).half(),)).module
    passes = list(KERNELS.passes)
    wrong = sorted(passes, key=lambda each: "norm" not in each.name)
    with pytest.raises(ValueError, match="which it needs: norms are folded into products"):
        check_order(wrong)
    assert (calls(with_kernels(graph, passes)), calls(with_kernels(graph, wrong))) == (2, 3)


def test_moments_of_groups_are_those_of_images_that_lie_channels_last() -> None:
    graph = convolutional(nn.Conv2d(4, 32, 1), nn.GroupNorm(2, 32), nn.Conv2d(32, 8, 1), size=32)
    passes = list(KERNELS.passes)
    wrong = moved(passes[-1].run, to=lay_float32_channels_last, passes=passes)
    with pytest.raises(ValueError, match="images lie channels last by then"):
        check_order(wrong)
    assert [triton(with_kernels(graph, each))["nimblec::group_moments"] for each in (passes, wrong)] == [1, 0]


@pytest.mark.parametrize("pipelines", [FUSED_REGIONS, TRITON], ids=["fused regions", "Triton kernels"])
def test_passes_stand_after_those_that_they_need(pipelines: tuple[Pipeline, ...]) -> None:
    check_order(each for pipeline in pipelines for each in pipeline.passes)


def test_a_report_counts_calls_before_and_after_each_pass() -> None:
    steps: list[Step] = []
    after = REWRITES(convolutional(nn.Conv2d(4, 4, 3), nn.ReLU()), Setting(), steps.append)
    assert [step.name for step in steps] == [each.name for each in phases(Setting())]
    assert all(a.after == b.before for a, b in pairwise(steps))
    assert (steps[0].before, steps[-1].after) == (2, calls(after)) == (2, 1)
    assert next(step for step in steps if step.after < step.before).name == "fuse_convolutions"


def test_a_pipeline_is_refused_where_a_pass_stands_before_one_that_it_needs() -> None:
    first, second = REWRITES.passes[:2]
    with pytest.raises(ValueError, match="fold_constants stands before fill_empty, which it needs: later passes look"):
        Pipeline(Phase(name="canonical", passes=(second, first)))
