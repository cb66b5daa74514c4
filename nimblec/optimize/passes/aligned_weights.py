"""Weights of linears padded with zeros to the multiples of 8 that tensor cores need."""

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from nimblec.graph.rewriter import Rewriter, argument_names, bound, fake
from nimblec.graph.vocabulary import BY_STRIDE, HALF

aten = torch.ops.aten

ALIGNMENT = 8
"""Elements of half precision in the 16 bytes that cuBLAS's faster kernels read and write at once."""

LARGE = 1 << 20
"""Elements of a weight from which slow kernels cost more than copies of the input and the result."""

LINEARS = {
    aten.mm.default: ("mat2", None),
    aten.addmm.default: ("mat2", "self"),
    aten._addmm_activation.default: ("mat2", "self"),
    aten.linear.default: ("weight", "bias"),
}
"""The names of weight and bias; the weights of the first three are (inputs, outputs), of the last (outputs, inputs)."""


def align_weights(module: fx.GraphModule) -> None:
    """Pad large constant weights in half precision to multiples of 8 outputs and inputs.

    The original result is a slice of the padded one. A weight that other calls read too, such as the embedding of a
    language model, is stored once: they read their part of the padded one.
    """
    if any(node.target in BY_STRIDE for node in module.graph.nodes):
        return
    rewriter = Rewriter(module)
    in_place: dict[int, Tensor] = {}
    for node in rewriter.calls(*LINEARS):
        if _is_worth_it(rewriter, node):
            _pad_inputs(rewriter, node)
            _pad_outputs(rewriter, node, in_place)
    rewriter.finish()


def _is_worth_it(rewriter: Rewriter, node: fx.Node) -> bool:
    weight = _weight(rewriter, node)
    return weight is not None and weight.dim() == 2 and weight.dtype in HALF and weight.numel() >= LARGE


def _names(node: fx.Node) -> tuple[str, str | None]:
    """Return the names of weight and bias."""
    assert isinstance(node.target, OpOverload)
    return LINEARS[node.target]


def _weight(rewriter: Rewriter, node: fx.Node) -> Tensor | None:
    """Return the weight as (outputs, inputs)."""
    weight = rewriter.value(bound(node)[_names(node)[0]])
    return weight if weight is None or node.target is aten.linear.default else weight.t()


def _pad_inputs(rewriter: Rewriter, node: fx.Node) -> None:
    """Append zeros to rows and to the weight's inputs, unless others read the weight, or the rows are too many."""
    weight = _weight(rewriter, node)
    assert weight is not None
    outputs, inputs = weight.shape
    more = -inputs % ALIGNMENT
    name = next(n for n in ("mat1", "input", "self") if n in bound(node) and n != _names(node)[1])
    rows = bound(node)[name]
    if not more or not _is_own(rewriter, weight) or fake(rows).numel() > weight.numel():
        return
    padded = weight.new_zeros((outputs, inputs + more))
    if weight.stride(0) == 1:  # keep the order in memory
        padded = weight.new_zeros((inputs + more, outputs)).t()
    padded[:, :inputs] = weight
    longer = rewriter.call(aten.constant_pad_nd.default, rows, [0, more], at=node)
    _set(node, **{name: longer, _names(node)[0]: _as_argument(rewriter, node, padded)})


def _pad_outputs(rewriter: Rewriter, node: fx.Node, in_place: dict[int, Tensor]) -> None:
    """Append zeros to the weight's outputs and to the bias; slice the result.

    ``in_place`` are the padded weights that other constants are parts of, by address.
    """
    weight = _weight(rewriter, node)
    assert weight is not None
    outputs = weight.shape[0]
    more = -outputs % ALIGNMENT
    weight_name, bias_name = _names(node)
    bias_node = bound(node)[bias_name] if bias_name else None
    bias = rewriter.value(bias_node)
    if not more or (bias_node is not None and (bias is None or bias.dim() != 1)):
        return
    if weight.is_contiguous():
        padded = in_place.get(weight.data_ptr(), weight)
        if len(padded) != outputs + more:
            padded = _padded_in_place(rewriter, weight, more)
            in_place[padded.data_ptr()] = padded
    elif _is_own(rewriter, weight):
        padded = weight.new_zeros((weight.shape[1], outputs + more)).t()
        padded[:outputs] = weight
    else:
        return
    changed = {weight_name: _as_argument(rewriter, node, padded)}
    if bias is not None and bias_name is not None and len(bias) == outputs:
        changed[bias_name] = rewriter.constant(torch.nn.functional.pad(bias, (0, more)), at=node)
    _set(node, **changed)
    like = node.meta["val"]
    node.meta["val"] = rewriter.infer(node)
    following = node.next
    part = rewriter.call(aten.slice.Tensor, node, like.dim() - 1, 0, outputs, at=following)
    part.meta["source"] = node.meta.get("source", "")
    node.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)


def _padded_in_place(rewriter: Rewriter, weight: Tensor, more: int) -> Tensor:
    """Return the weight with rows of zeros appended; all constants in its memory become parts of the padded one."""
    padded = torch.cat([weight, weight.new_zeros((more, weight.shape[1]))])
    for constant in _sharing(rewriter, weight):
        value = rewriter.value(constant)
        assert value is not None
        begin = value.storage_offset() - weight.storage_offset()
        view = padded.as_strided(value.shape, value.stride(), begin)
        constant.replace_all_uses_with(rewriter.constant(view, at=constant))
    return padded


def _is_own(rewriter: Rewriter, weight: Tensor) -> bool:
    """Return whether a single call reads the weight, so that a padded copy replaces it."""
    return sum(len(constant.users) for constant in _sharing(rewriter, weight)) == 1


def _sharing(rewriter: Rewriter, weight: Tensor) -> list[fx.Node]:
    """Return the constants that lie in the memory of the weight, itself included."""
    return [n for n in rewriter.graph.nodes if n.users and _lies_in(rewriter.value(n), weight)]


def _lies_in(value: Tensor | None, weight: Tensor) -> bool:
    if value is None or value.dtype != weight.dtype or not value.numel():
        return False
    begin = value.data_ptr() - weight.data_ptr()
    last = sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
    return begin >= 0 and begin + (last + 1) * weight.element_size() <= weight.nbytes


def _as_argument(rewriter: Rewriter, node: fx.Node, weight: Tensor) -> fx.Node:
    """Return a weight (outputs, inputs) in the order of axes that the call takes."""
    return rewriter.constant(weight if node.target is aten.linear.default else weight.t(), at=node)


def _set(node: fx.Node, **changed: fx.Node) -> None:
    """Replace arguments of a call by name."""
    args = [changed.get(name, value) for name, value in zip(argument_names(node), node.args, strict=False)]
    kwargs = {name: changed.get(name, value) for name, value in node.kwargs.items()}
    node.args, node.kwargs = tuple(args), kwargs
