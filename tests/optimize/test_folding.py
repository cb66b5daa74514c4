"""Constant folding, common subexpressions, calls without effect, outputs in memory of their own."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from rewriting import assert_same, counts, optimize, record, rewritten
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

from nimblec.graph.outputs import separate_outputs
from nimblec.graph.simplify import simplify
from nimblec.optimize.passes.folding import GROWTH, fill_empty, fold_constants
from nimblec.optimize.passes.subexpressions import merge_equal_calls
from nimblec.pytorch.aten_graph import trace

aten = torch.ops.aten
Call = Callable[..., fx.Node]
X = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)


def _with_calls(build: Callable[..., list[fx.Node]], *constants: torch.Tensor) -> fx.GraphModule:
    """Return a graph on X whose constants are not folded yet: ``build(graph, x, *constants)`` gives its outputs."""
    module = record(lambda x: x * 2.0, X)
    graph = module.graph
    (x,) = (n for n in graph.nodes if n.op == "placeholder")
    output = graph.output_node()
    mode = x.meta["val"].fake_mode

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    with graph.inserting_before(output):
        nodes = []
        for i, tensor in enumerate(constants):
            module.register_buffer(f"given_{i}", tensor)
            node = graph.get_attr(f"given_{i}")
            node.meta["val"] = mode.from_tensor(tensor)
            nodes.append(node)
        output.args = (tuple(build(call, x, *nodes)),)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def test_chains_of_known_values_become_one_constant() -> None:
    def build(call: Call, x: fx.Node, c: fx.Node) -> list[fx.Node]:
        row = call(aten.select.int, call(aten.exp.default, c), 0, 1)
        return [call(aten.add.Tensor, x, call(aten.mul.Tensor, row, 3))]

    before = _with_calls(build, torch.randn(2, 4, dtype=torch.float64))
    after = rewritten(before, fold_constants)
    assert counts(after) == {"add": 1}
    assert [name for name, _ in after.named_buffers()] == [n.target for n in after.graph.nodes if n.op == "get_attr"]
    assert_same(before, after, X)


def test_a_result_of_several_parts() -> None:
    def build(call: Call, x: fx.Node, c: fx.Node) -> list[fx.Node]:
        parts = call(aten.split.Tensor, c, 2, 1)
        left, right = (call(operator.getitem, parts, i) for i in range(2))
        return [call(aten.mul.Tensor, x, call(aten.cat.default, [right, left], 1))]

    before = _with_calls(build, torch.randn(3, 4, dtype=torch.float64))
    after = rewritten(before, fold_constants)
    assert counts(after) == {"mul": 1}
    assert_same(before, after, X)


def test_what_would_swell_the_weights_stays() -> None:
    def build(call: Call, x: fx.Node, c: fx.Node) -> list[fx.Node]:
        wide = call(aten.repeat.default, c, [GROWTH, 1])
        return [call(aten.add.Tensor, x, call(aten.select.int, wide, 0, 7)), call(aten.expand.default, c, [5, 4])]

    before = _with_calls(build, torch.randn(1, 4, dtype=torch.float64))
    after = rewritten(before, fold_constants)
    assert counts(after) == {"repeat": 1, "select": 1, "add": 1, "expand": 1}


def test_what_is_made_empty_holds_zeros() -> None:
    module = _with_calls(lambda call, x: [call(aten.slice.Tensor, call(aten.new_empty.default, x, (5, 6)), 0, 1, 3)])
    filled = rewritten(module, fill_empty)
    assert counts(filled)["new_empty"] == 0
    assert torch.equal(filled(X)[0], torch.zeros(2, 6, dtype=X.dtype))


def test_a_mask_of_zeros_like_an_image_is_constant() -> None:
    def build(call: Call, x: fx.Node) -> list[fx.Node]:
        zeros, ones = (call(op, x, [3, 4]) for op in (aten.new_zeros.default, aten.new_ones.default))
        large = call(aten.new_zeros.default, x, [GROWTH])
        return [call(aten.mul.Tensor, x, call(aten.sub.Tensor, ones, zeros)), large]

    before = _with_calls(build)
    after = rewritten(before, fill_empty, fold_constants)
    assert counts(after) == {"mul": 1, "new_zeros": 1}
    assert_same(before, after, X)


def test_circular_padding_reads_nothing_that_is_not_written() -> None:
    model = nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular").eval()
    module = trace(model, (torch.randn(1, 2, 5),), {}, device="cpu").module
    assert any("empty" in name for name in counts(module))
    assert not any("empty" in name for name in counts(optimize(module, device="cuda")))


def test_random_calls_are_neither_folded_nor_merged() -> None:
    def build(call: Call, _x: fx.Node, c: fx.Node) -> list[fx.Node]:
        return [call(aten.bernoulli.p, c, 0.5), call(aten.bernoulli.p, c, 0.5)]

    after = rewritten(_with_calls(build, torch.zeros(4, dtype=torch.float64)), fold_constants, merge_equal_calls)
    assert counts(after) == {"bernoulli": 2}


def test_equal_calls_and_constants_are_one() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64)

    def build(call: Call, x: fx.Node, c: fx.Node, d: fx.Node) -> list[fx.Node]:
        first = call(aten.matmul.default, x, call(aten.t.default, c))
        second = call(aten.matmul.default, x, call(aten.t.default, d))
        other = call(aten.matmul.default, x, c)
        return [call(aten.add.Tensor, first, call(aten.mul.Tensor, second, other))]

    before = _with_calls(build, weight, weight)
    after = rewritten(before, merge_equal_calls)
    assert counts(after) == {"t": 1, "matmul": 2, "mul": 1, "add": 1}
    assert_same(before, after, X)


def test_arguments_of_other_types_are_not_equal() -> None:
    def build(call: Call, x: fx.Node) -> list[fx.Node]:
        return [call(aten.mul.Tensor, x, factor) for factor in (1, 1.0, True, 1)]

    assert counts(rewritten(_with_calls(build), merge_equal_calls)) == {"mul": 3}


def test_zeros_of_either_sign_are_not_equal() -> None:
    def build(call: Call, x: fx.Node) -> list[fx.Node]:
        return [call(aten.mul.Tensor, x, factor) for factor in (0.0, -0.0)]

    assert counts(rewritten(_with_calls(build), merge_equal_calls)) == {"mul": 2}


def test_merged_outputs_get_memory_of_their_own() -> None:
    def build(call: Call, x: fx.Node, c: fx.Node) -> list[fx.Node]:
        return [
            call(aten.relu.default, x),
            call(aten.reshape.default, call(aten.relu.default, x), [6, 4]),
            call(aten.t.default, c),
            x,
        ]

    before = _with_calls(build, torch.randn(3, 4, dtype=torch.float64))
    after = rewritten(before, fold_constants, merge_equal_calls, separate_outputs)
    assert counts(after)["relu"] == 1
    results = after(X)
    places = {t.untyped_storage().data_ptr() for t in (X, *results, *after.buffers())}
    assert len(places) == 1 + len(results) + len(list(after.buffers()))
    for wanted, got in zip(before(X), results, strict=True):
        assert torch.equal(wanted, got)


def test_chains_of_views_are_one_view() -> None:
    def build(call: Call, x: fx.Node) -> list[fx.Node]:
        y = call(aten.reshape.default, call(aten.reshape.default, x, [6, 4]), [4, 6])
        z = call(aten.permute.default, call(aten.transpose.int, call(aten.t.default, y), 0, 1), [1, 0])
        back = call(aten.t.default, z)
        return [call(aten.relu.default, z), call(aten.relu.default, back), call(aten.view.default, x, [2, 3, 4])]

    before = _with_calls(build)
    after = rewritten(before, simplify)
    assert counts(after) == {"reshape": 1, "permute": 1, "relu": 2}
    assert_same(before, rewritten(after, separate_outputs), X)


def test_convolutions_pad_by_themselves() -> None:
    x, weight = torch.randn(1, 2, 8, 7), torch.randn(3, 2, 3, 3)

    def padded(*sides: int, value: float = 0.0) -> fx.GraphModule:
        return record(lambda x: F.conv2d(F.pad(x, sides, value=value), weight, stride=2, padding=(1, 0)), x)

    taken_in = (), (0, 0, 0, 0), (1, 1), (2, 2, 1, 1)
    for sides in (*taken_in, (0, 1, 0, 1), (0, 0, 0, 0, 1, -1)):
        before = padded(*sides)
        after = rewritten(before, simplify)
        assert counts(after)["constant_pad_nd"] == (sides not in taken_in)
        assert_same(before, after, x)
    assert counts(rewritten(padded(1, 1, value=2.0), simplify))["constant_pad_nd"] == 1


def test_empty_parts_of_a_concatenation_go() -> None:
    """As of rotary embeddings of whole heads."""
    before = record(lambda x: torch.cat([torch.cat([x.cos(), x[..., 4:]], -1), x[:, :0], x], 1), X)
    after = rewritten(before, simplify)
    assert counts(after)["cat"] == 1
    assert_same(before, after, X)


def test_reshapes_that_a_call_sees_the_strides_of_stay() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    before = record(lambda x: x.t().reshape(24).reshape(6, 4).as_strided((2, 2), (1, 2)), x)
    assert_same(before, rewritten(before, simplify), x)


def test_copies_that_change_order_or_dtype_stay() -> None:
    def build(call: Call, x: fx.Node) -> list[fx.Node]:
        turned = call(aten.transpose.int, x, 0, 2)
        dense = call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        same = call(aten.clone.default, x)
        narrow = call(aten._to_copy.default, same, dtype=torch.float32)
        return [dense, narrow]

    after = rewritten(_with_calls(build), simplify)
    assert counts(after) == {"transpose": 1, "clone": 1, "_to_copy": 1}
    assert after(X)[0].is_contiguous()


def test_constants_that_nothing_reads_are_let_go() -> None:
    before = record(lambda x: torch.mm(x, torch.eye(4).double()).relu(), X[0])
    root = torch.nn.Module()
    root.layer = torch.nn.Linear(4, 4, bias=False).double()
    graph = before.graph.__deepcopy__()
    (node,) = (n for n in graph.nodes if n.op == "get_attr")
    node.target = "layer.weight"
    (product,) = (n for n in graph.nodes if "mm" in str(n.target))
    with graph.inserting_before(product):
        product.args = (product.args[0], graph.call_function(aten.mul.Tensor, (node, 2)))
        product.args[1].meta["val"] = node.meta["val"]
    after = rewritten(fx.GraphModule(root, graph), fold_constants)
    assert not list(after.named_parameters())
    assert [tuple(t.shape) for t in after.buffers()] == [(4, 4)]
    torch.testing.assert_close(after(X[0])[0], (X[0] @ (root.layer.weight * 2)).relu())


def test_one_number_for_all_axes_is_spelled_out() -> None:
    class Patches(nn.Conv2d):
        """As the patch embedding of SigLIP: padding by name."""

        def __init__(self) -> None:
            super().__init__(3, 8, 4, stride=4, padding="valid")

    x = torch.randn(1, 3, 8, 8)
    before = trace(Patches(), (x,)).module
    after = rewritten(before, simplify)
    (call,) = (node for node in after.graph.nodes if node.target is torch.ops.aten.convolution.default)
    assert [list(call.args[place]) for place in (3, 4, 5)] == [[4, 4], [0, 0], [1, 1]]
    assert_same(before, after, x)
