"""Regions: connected, convex and maximal by an obvious definition; as graphs of their own, equal results."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from examples import examples
from families import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from rewriting import assert_same, checked, compile_regions, counts, family, optimize, record, rewritten
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from nimblec.graph.fusible import is_fusible, is_slow_alone, is_stencil
from nimblec.graph.rewriter import Rewriter
from nimblec.graph.views import is_view
from nimblec.optimize.passes import inductor
from nimblec.optimize.passes.biases import free_biases
from nimblec.optimize.passes.channels_last import propagate_channels_last
from nimblec.optimize.passes.inductor import signature
from nimblec.optimize.passes.partition import Extract, Region, extract, partition, replace


def _as_calls(module: fx.GraphModule, regions: Sequence[Region]) -> fx.GraphModule:
    """Return a copy in which each region is one call of its own graph."""
    result = fx.GraphModule(module, module.graph.__deepcopy__())
    twins = dict(zip(module.graph.nodes, result.graph.nodes, strict=True))

    def function(extracted: Extract) -> Callable[[list[Tensor]], Any]:
        return lambda inputs: extracted.module(*inputs)

    extracts = [extract(tuple(twins[c] for c in region)) for region in regions]
    replace(result, {function(e): [e] for e in extracts})
    result.recompile()
    return result


def _dependencies(module: fx.GraphModule) -> nx.DiGraph:
    graph = nx.DiGraph()
    for node in module.graph.nodes:
        graph.add_node(node)
        graph.add_edges_from((source, node) for source in node.all_input_nodes)
    return graph


def _contracted(graph: nx.DiGraph, groups: Sequence[Sequence[fx.Node]]) -> nx.DiGraph:
    """Return the graph with each group as one node; a view that only serves a group does not tie it to others."""
    name = {node: ("group", i) for i, group in enumerate(groups) for node in group}
    result = nx.DiGraph()
    for node in graph:
        if is_view(node) or node.target is operator.getitem:
            continue
        mine = name.get(node, node)
        result.add_node(mine)
        for source in _sources(node):
            if name.get(source, source) != mine:
                result.add_edge(name.get(source, source), mine)
    return result


def _sources(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for source in node.all_input_nodes:
        is_part = is_view(source) or source.target is operator.getitem
        found |= _sources(source) if is_part else {source}
    return found


def _check_partition(module: fx.GraphModule, regions: Sequence[Region]) -> None:
    graph = _dependencies(module)
    calls = [call for region in regions for call in region]
    assert len(calls) == len(set(calls))
    assert all(is_fusible(call) and not is_view(call) for call in calls)
    assert nx.is_directed_acyclic_graph(_contracted(graph, regions))
    for region in regions:
        inside = nx.Graph()
        inside.add_edges_from((s, c) for c in region for s in _sources(c) if s in region)
        inside.add_nodes_from(region)
        assert nx.is_connected(inside)
        assert len(region) > 1 or is_slow_alone(region[0])
        assert set(inside) == set(region)
    singles = [[n] for n in graph if n.op == "call_function" and is_fusible(n) and not is_view(n) and n not in calls]
    groups = [list(region) for region in regions] + singles
    of = {node: group for group in groups for node in group}
    for group in groups:
        for node in group:
            for source in _sources(node):
                other = of.get(source)
                if other is None or other is group or is_stencil(node):
                    continue
                joined = [g for g in groups if g is not group and g is not other] + [group + other]
                assert not nx.is_directed_acyclic_graph(_contracted(graph, joined)), "two groups could be one"


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a + b,
    lambda a, b: torch.sigmoid(a) * b,
    lambda a, b: torch.softmax(a - b, -1),
    torch.mm,
    lambda a, b: torch.mm(a, b).t() + a[:1],
    lambda a, b: torch.cat([a[:2], b.reshape(2, 8)[:, :4]], 0),
    lambda a, b: torch.nn.functional.layer_norm(a, [4]) + b.sum(0),
    lambda a, b: a.chunk(2, 1)[1].repeat(1, 2) * b,
    lambda a, _: torch.mul(*torch.native_layer_norm(a, [4], None, None, 1e-5)[:2]),
    lambda a, _: a.t(),
)


@examples(60)
@given(data=st.data())
def test_random_graphs(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 14))
    steps = [data.draw(st.sampled_from(STEPS)) for _ in range(count)]
    choices = [(step, data.draw(st.integers(0, n)), data.draw(st.integers(0, n))) for n, step in enumerate(steps)]

    def model(x: Tensor) -> list[Tensor]:
        values = [x]
        for step, first, second in choices:
            values.append(step(values[first], values[second]))
        return [torch.tanh(values[-1]), values[len(values) // 2]]

    module = record(model, X)
    regions = partition(module)
    _check_partition(module, regions)
    assert_same(module, _as_calls(module, regions), X, rtol=1e-12)


@pytest.mark.parametrize("name", [*FAMILIES, "densenet"])
def test_families(name: str) -> None:
    before, inputs = family(name, torch.float32)
    module = optimize(before, device="cpu")
    free_biases(module)
    regions = partition(module)
    assert regions
    _check_partition(module, regions)
    after = _as_calls(module, regions)
    assert len(after.graph.nodes) < len(before.graph.nodes)
    assert_same(before, after, *inputs, rtol=2e-5)


def test_what_lies_between_splits_a_region() -> None:
    def model(x: Tensor) -> Tensor:
        y = torch.relu(x + 1)
        return torch.tanh(torch.mm(y, y)) + y * 2

    regions = partition(record(model, X))
    assert sorted(_names(regions)) in (
        [["add", "relu"], ["tanh", "mul", "add"]],
        [["add", "relu", "mul"], ["tanh", "add"]],
    )


def test_a_norm_and_its_activation_in_half_precision() -> None:
    vector, x = torch.rand(4), torch.randn(2, 4, 3, 3).half()

    def model(x: Tensor) -> Tensor:
        y = torch.ops.aten._native_batch_norm_legit_no_training(x, vector, vector, vector, vector, 0.1, 1e-5)[0]
        return torch.relu(y)

    before = record(model, x)
    (region,) = partition(before)
    assert len(region) == 2
    after = compile_regions(before)
    assert sum(n.op == "call_function" for n in after.graph.nodes) == 2  # the op, and its one result
    assert_same(before, after, x, rtol=2e-3)


def test_pooling_begins_a_region() -> None:
    x = torch.randn(1, 2, 8, 8)
    module = record(lambda x: torch.relu(torch.nn.functional.avg_pool2d(torch.sigmoid(x) * 2, 2)) + 1, x)
    first, second = partition(module)
    assert [len(first), len(second)] == [2, 3]


IMAGE = torch.randn(1, 4, 12, 12, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)


BATCH_NORM = "_native_batch_norm_legit_no_training"
ONES = [torch.ones(4)] * 4
MIRRORED = torch.ops.aten.reflection_pad2d_backward.default


def _names(regions: Sequence[Region]) -> list[list[str]]:
    return [[c.target._schema.name.partition("::")[2] for c in region] for region in regions]


@pytest.mark.parametrize(
    ("slow", "name"),
    [
        (lambda x: F.max_pool2d(x, 3, 2, 1), "max_pool2d_with_indices"),
        (lambda x: F.avg_pool2d(x, 3, 1, 1), "avg_pool2d"),
        (lambda x: F.adaptive_avg_pool2d(x, 3), "_adaptive_avg_pool2d"),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "upsample_bilinear2d"),
        (lambda x: torch.roll(x, (1, 2), (2, 3)), "roll"),
        (lambda x: F.pad(x, (0, 1, 2, 3)), "constant_pad_nd"),
        (lambda x: MIRRORED(x, x[:, :, 1:-1, 1:-1], [1] * 4), "reflection_pad2d_backward"),
        (lambda x: F.group_norm(x.contiguous(), 2), "native_group_norm"),
        (lambda x: torch.ops.aten._native_batch_norm_legit_no_training(x, *ONES, 0.1, 1e-5)[0], BATCH_NORM),
        (lambda x: torch.cat([x, x], 0), "cat"),
        (lambda x: x.mT.clone(memory_format=torch.contiguous_format), "clone"),
        (lambda x: x * x[:, :, :1], "mul"),
        (lambda x: (x * 2).max(1, keepdim=True)[0].expand_as(x), "max"),
    ],
)
def test_what_is_slow_alone_is_a_region(slow: Callable[[Tensor], Tensor], name: str) -> None:
    weight = torch.randn(4, 4, 1, 1)
    module = record(lambda x: torch.conv2d(slow(torch.conv2d(x, weight)), weight), IMAGE)
    (region,) = partition(module)
    assert _names([region])[0][-1] == name
    assert len(extract(region).outputs) == 1


@pytest.mark.parametrize(
    "fast",
    [
        torch.sigmoid,
        torch.clone,
        lambda x: x.max(1)[1],
        lambda x: torch.mm(x[0, 0], x[0, 0]) * 2,
        lambda x: F.avg_pool2d(x, 6),  # Inductor has no kernel for it
        lambda x: F.max_pool2d(x, 6),
        lambda x: F.adaptive_avg_pool2d(x, 2),
    ],
)
def test_what_is_as_fast_alone_is_none(fast: Callable[[Tensor], Tensor]) -> None:
    assert partition(record(lambda x: fast(torch.conv2d(x, torch.ones(4, 4, 1, 1))), IMAGE)) == ()


def test_alike_regions_of_one_result_are_one() -> None:
    """As rotary embeddings of queries and keys, which one product computes."""
    weight, angles = torch.randn(6, 18), torch.randn(5, 6)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        queries, keys, values = (x @ weight).split(6, 1)
        turned = [y * angles.cos() + torch.cat([-y[:, 3:], y[:, :3]], 1) * angles.sin() for y in (queries, keys)]
        return torch.mm(*turned[:1], turned[1].mT), values.exp().mul(2) @ weight

    regions = partition(record(model, torch.randn(5, 6)))
    assert [len(extract(region).outputs) for region in regions] == [2, 1]


def _mixed(x: Tensor) -> Tensor:
    """Return an Inception block: branches on one image, two of them pools, and another block's pool on all."""
    weight = torch.randn(4, 4, 1, 1, generator=torch.Generator().manual_seed(1))
    x = torch.conv2d(x, weight)
    pooled = torch.conv2d(F.avg_pool2d(x, 3, 1, 1), weight)
    y = torch.cat([torch.conv2d(x, weight), pooled, F.max_pool2d(x, 3, 1, 1)], 1)
    return torch.conv2d(F.avg_pool2d(y, 3, 1, 1), weight.repeat(1, 3, 1, 1)).mean((2, 3))


def test_pools_and_concatenations_of_branches() -> None:
    original = record(_mixed, IMAGE)
    before = rewritten(original, lambda module: propagate_channels_last(module, {torch.float32}))
    regions = partition(before)
    assert _names(regions) == [["clone"], ["avg_pool2d"], ["max_pool2d_with_indices", "cat"], ["avg_pool2d"], ["mean"]]
    assert [len(extract(region).outputs) for region in regions] == [1, 1, 1, 1, 1]
    after = compile_regions(before)
    assert not counts(after).keys() & {"avg_pool2d", "cat", "max_pool2d_with_indices"}
    results = [n.meta["val"] for n in after.graph.nodes if n.target is operator.getitem]
    assert len(results) == 5
    assert all(t.dim() == 2 or t.is_contiguous(memory_format=torch.channels_last) for t in results)
    assert_same(original, after, IMAGE, rtol=1e-5)


def test_means_and_adaptive_pools_of_images_with_channels_last() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        x = torch.sigmoid(x.contiguous(memory_format=torch.channels_last))
        y = torch.relu(x + 1)
        return y.mean((2, 3)), F.adaptive_avg_pool2d(x, 4), F.adaptive_avg_pool2d(x * 2, (5, 3)) * 3, y

    before = record(model, IMAGE)
    after = compile_regions(before)
    names = counts(after)
    assert sum(n for name, n in names.items() if name.startswith("fused_")) == 3
    assert {name for name in names if not name.startswith("fused_")} <= {"mul"}  # what a pool reads is computed once
    assert_same(before, after, IMAGE, rtol=1e-5)


def test_a_region_returns_no_view() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x + 1)
        return torch.mm(y.t(), x), torch.mm(y[:2], x)

    module = record(model, X)
    (region,) = partition(module)
    extracted = extract(region)
    assert extracted.outputs == (region[-1],)
    assert [n.op for n in extracted.module.graph.nodes] == ["placeholder", "call_function", "call_function", "output"]


def test_a_region_takes_the_place_of_its_first_call() -> None:
    module = record(lambda x: ((x @ x).sin().cos() @ x, x @ x.t()), torch.zeros(3, 3))
    called = [node.name for node in _as_calls(module, partition(module)).graph.nodes if node.op == "call_function"]
    assert called[:4] == ["mm_default", "_lambda_", "getitem", "mm_default_1"]


def test_random_calls_and_products_are_not_fused() -> None:
    x = torch.randn(4, 4)
    assert partition(record(lambda x: torch.mm(torch.bernoulli(x.sigmoid()), x).relu(), x)) == ()


def test_biases_go_to_the_kernel_that_follows() -> None:
    weight, bias, x = torch.randn(4, 2, 3, 3), torch.randn(4), torch.randn(1, 2, 8, 8)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.conv2d(x, weight, bias)
        return torch.sigmoid(y) * y, torch.conv2d(torch.conv2d(x, weight, bias), weight.mT.reshape(2, 4, 3, 3))

    before = record(model, x)
    after = fx.GraphModule(before, before.graph.__deepcopy__())
    free_biases(after)
    assert counts(after) == counts(before) + counts(record(lambda x: x + 1, x))
    assert_same(before, after, x, rtol=1e-5)


def test_biases_are_added_behind_views() -> None:
    weight, bias, x = torch.randn(4, 2, 3, 3), torch.randn(4), torch.randn(1, 2, 8, 8)

    def seen(x: Tensor) -> Tensor:
        return torch.sigmoid(torch.conv2d(x, weight, bias).flatten(2).transpose(1, 2))

    def returned(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.conv2d(x, weight, bias).flatten(2)
        return y, torch.sigmoid(y)

    for model, added in ((seen, 1), (returned, 0)):
        assert counts(checked(model, x, free_biases, rtol=1e-5))["add"] == added


def _inverted(x: Tensor, channels: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return the block of MobileNetV2 (Sandler et al. 2018): widen, depthwise, narrow without an activation."""

    def convolve(x: Tensor, outputs: int, kernel: int, groups: int = 1) -> Tensor:
        weight = torch.randn(outputs, x.shape[1] // groups, kernel, kernel, generator=generator) / 2
        bias = torch.randn(outputs, generator=generator)
        return torch.conv2d(x, weight.to(dtype), bias.to(dtype), padding=kernel // 2, groups=groups)

    y = F.hardtanh(convolve(x, 8, 1), 0, 6)
    return convolve(F.hardtanh(convolve(y, 8, 3, groups=8), 0, 6), channels, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_biases_go_through_the_next_convolution(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 6, 6, generator=generator).to(dtype)

    def model(x: Tensor) -> Tensor:
        x = _inverted(x, 4, generator, dtype)  # read by a convolution alone
        x = _inverted(x, 6, generator, dtype)  # read by a convolution and a sum
        x = x + _inverted(x, 6, generator, dtype)
        return torch.sigmoid(x)

    after = checked(model, x, free_biases, rtol=1e-12 if dtype is torch.float64 else 2e-2)
    assert all(n.args[2] is None for n in after.graph.nodes if n.target is torch.ops.aten.convolution.default)
    assert counts(after)["add"] == 1 + 6 + 2  # the residual; six by the activations; two in the residual's region
    assert len(partition(after)) == 7


def test_biases_go_into_grouped_and_fused_convolutions() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator).double() for shape in ((8, 2, 3, 3), (8,)))
    fused = torch.ops.aten.cudnn_convolution_relu.default
    x = torch.randn(1, 4, 9, 9, generator=generator).double()
    before = record(lambda x: torch.conv2d(torch.conv2d(x, weight, bias, groups=2), weight[:, :2], None, groups=4), x)
    rewriter = Rewriter(before)
    (first, second) = rewriter.calls(torch.ops.aten.convolution.default)
    joined = rewriter.call(fused, first, *second.args[1:6], second.args[8], at=second)
    rewriter.replace(second, joined)
    rewriter.finish()
    after = rewritten(before, free_biases)
    (call,) = (n for n in after.graph.nodes if n.target is fused)
    assert call.args[2].op == "get_attr"
    assert counts(after) == {"convolution": 1, "cudnn_convolution_relu": 1}
    assert_same(before, after, x, rtol=1e-12)


@pytest.mark.parametrize(
    "follow",
    [
        lambda y: torch.conv2d(y, torch.ones(4, 4, 3, 3), padding=1),  # padding has no bias
        lambda y: torch.conv_transpose2d(y, torch.ones(4, 4, 3, 3)),
        lambda y: torch.conv2d(y, y[:, :, :2, :2]),
        lambda y: (torch.conv2d(y, torch.ones(4, 4, 1, 1)), y),
        lambda y: torch.conv2d(torch.ones(1, 4, 9, 9), y.view(4, 1, 8, 8), groups=4),
    ],
)
def test_biases_that_nothing_takes_stay(follow: Callable[[Tensor], Any]) -> None:
    weight, bias = torch.ones(4, 4, 1, 1), torch.arange(4.0)
    before = record(lambda x: follow(torch.conv2d(x, weight, bias)), torch.zeros(1, 4, 8, 8))
    after = rewritten(before, free_biases)
    assert next(n for n in after.graph.nodes if "conv" in str(n.target)).args[2] is not None


class _Seen(TorchDispatchMode):
    """The names of the ops that reach a device, as the capture of a plan sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _layers(x: Tensor) -> tuple[Tensor, ...]:
    weight = torch.eye(8) + 0.1
    for _ in range(2):
        x = torch.nn.functional.layer_norm(torch.mm(x, weight) + x, [8])
    y = torch.mm(x, weight).t() * 2 + 1
    return x, y, torch.relu(y)


def test_inductor_compiles_each_kind_of_region_once() -> None:
    x = torch.randn(8, 8)
    before = record(_layers, x)
    after = compile_regions(before)
    calls = [n for n in after.graph.nodes if n.op == "call_function" and "nimblec" in str(n.target)]
    assert len(calls) == 3
    assert len({n.target for n in calls}) == 2
    assert_same(before, after, x, rtol=1e-5)
    with _Seen() as seen:
        results = after(x)
    assert [name.partition("_native")[0].partition("_relu")[0] for name in seen.names] == [
        *["aten.mm.default", "nimblec.fused_add"] * 2,
        "aten.mm.default",
        "nimblec.fused_mul_add",
    ]
    assert len({t.untyped_storage().data_ptr() for t in (x, *results)}) == 4
    assert compile_regions(before).code == after.code


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ops.aten._safe_softmax(x.masked_fill(x > -1, -torch.inf), -1),
        lambda x: torch.ops.aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)[0],
        lambda x: MIRRORED(x, x[:, :, 1:-1, 1:-1], [1] * 4),
    ],
)
def test_calls_of_training_are_generated(call: Callable[[Tensor], Tensor]) -> None:
    image = IMAGE.contiguous()
    before = record(call, image)
    after = compile_regions(before)
    with _Seen() as seen:
        after(image)
    assert not [name for name in seen.names if not name.startswith("nimblec.")]
    assert_same(before, after, image)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_resizing_of_images_is_generated(mode: str) -> None:
    """The library would compute it in a kernel of its own, and no plan for an absent GPU could."""
    before = record(lambda x: F.interpolate(x, scale_factor=1.5, mode=mode) * 2, IMAGE)
    compiled = inductor.compile_graph(before, [IMAGE])
    with _Seen() as seen:
        (result,) = compiled([IMAGE])
    assert not any("upsample" in name for name in seen.names)
    torch.testing.assert_close(result, before(IMAGE)[0], rtol=1e-5, atol=1e-5)


def test_inputs_that_lie_otherwise_than_inferred() -> None:
    x = torch.randn(8, 8)
    after = compile_regions(record(lambda x: torch.cosh(x * 3) + x, x))
    (call,) = (n for n in after.graph.nodes if "nimblec" in str(n.target))
    expected = torch.cosh(x.t() * 3) + x.t()
    (result,) = call.target([x.t()])
    torch.testing.assert_close(result, expected)
    assert result.is_contiguous()


def test_strides_of_axes_of_length_1_say_nothing() -> None:
    """As in SKNet: Inductor lays a stack of one image otherwise than inferred, but for its first axis alone."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        stack = torch.stack([x.cos(), x.sin()], 1)
        return stack, stack.sum(1).mean((2, 3), keepdim=True)

    x = torch.randn(1, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    before = record(model, x)
    (images,) = (node for node in before.graph.nodes if node.op == "placeholder")
    images.meta["val"] = images.meta["val"].contiguous(memory_format=torch.channels_last)
    Rewriter(before).propagate()
    after = compile_regions(before)
    assert [name.partition("_")[0] for name in counts(after) if name != "getitem"] == ["fused"]
    inferred = [tuple(node.meta["val"].stride()) for node in after.graph.output_node().all_input_nodes]
    assert [result.stride() for result in after(x)] == inferred
    assert_same(before, after, x)


def test_a_region_that_inductor_refuses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(inductor, "compile_fx_inner", refuse)
    before = record(lambda x: torch.cosh(x + 3) * 0.1, X)
    after = compile_regions(before)
    assert counts(after) == {"add": 1, "cosh": 1, "mul": 1}
    assert_same(before, after, X)


def test_pools_alone_are_worth_generated_code_only_at_any_cost() -> None:
    images = torch.randn(1, 4, 8, 8)
    pools = record(lambda x: F.conv2d(F.max_pool2d(x, 2), torch.ones(4, 4, 1, 1)).mean((2, 3)), images)
    assert counts(compile_regions(pools, at_any_cost=False)) == counts(pools)
    assert [region[0].target for region in partition(pools)] == [
        torch.ops.aten.max_pool2d_with_indices.default,
        torch.ops.aten.mean.dim,
    ]
    assert not counts(compile_regions(pools)).keys() & {"max_pool2d_with_indices", "mean"}
    for more in (lambda x: x.relu() + 1, lambda x: torch.roll(x, 1, 3)):
        both = record(lambda x, more=more: (F.max_pool2d(x, 2), more(x)), images)
        assert "max_pool2d_with_indices" not in counts(compile_regions(both, at_any_cost=False))


def test_regions_are_told_apart_by_values_and_strides() -> None:
    def only(function: Callable[[Tensor], Tensor], x: Tensor) -> str:
        module = record(function, x)
        return signature(extract(partition(module)[0]))

    base = only(lambda x: torch.relu(x + 1), X)
    assert base == only(lambda x: torch.relu(x + 1), X)
    others = [
        only(lambda x: torch.relu(x + 2), X),
        only(lambda x: torch.relu(x + 1), X.float()),
        only(lambda x: torch.relu(x + 1), X[:2]),
        only(lambda x: torch.sigmoid(x + 1), X),
    ]
    assert len({base, *others}) == 5
