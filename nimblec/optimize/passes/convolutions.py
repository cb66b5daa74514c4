"""Convolution, bias, residual and ReLU as one cuDNN call."""

from typing import Any

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, bound, called, fake, is_call, only_user
from nimblec.graph.vocabulary import CONVOLUTION, DTYPES, is_like, is_relu, is_well_grouped

aten = torch.ops.aten


def fuse_convolutions(module: fx.GraphModule) -> None:
    """Fuse ``relu(convolution)`` and ``relu(convolution + z)`` into `aten.cudnn_convolution[_add]_relu`.

    A call that cuDNN does not support on this device stays as it was, and so do most grouped convolutions:
    there cuDNN's fused kernels are slower than the plain ones, ten times and more where groups have more
    results than channels (measured on an H200), and for depthwise ones (pytorch/pytorch pull request 192838).
    """
    rewriter = Rewriter(module)
    for node in list(module.graph.nodes):
        if not is_relu(node):
            continue
        source = argument(node, 0)
        if only_user(source) is not None:
            fused = _fuse(rewriter, node, source) or _fuse_residual(rewriter, node, source)
            if fused is not None:
                rewriter.replace(node, fused)
    rewriter.finish()


def _fuse(rewriter: Rewriter, relu: fx.Node, source: fx.Node) -> fx.Node | None:
    if not _can_fuse(rewriter, source):
        return None
    given = bound(source)
    return _call(rewriter, relu, aten.cudnn_convolution_relu.default, given, ())


def _fuse_residual(rewriter: Rewriter, relu: fx.Node, source: fx.Node) -> fx.Node | None:
    """Return the fused call for the later convolution of a sum: the other term is computed before it."""
    if not is_call(source, aten.add.Tensor):
        return None
    terms = [term for term in source.args[:2] if isinstance(term, fx.Node)]
    alpha: Any = source.kwargs.get("alpha", 1)
    for term in sorted(terms, reverse=True):  # nodes compare by their place in the graph
        others = [t for t in terms if t is not term]
        if len(others) != 1 or only_user(term) is None or not _can_fuse(rewriter, term):
            continue
        (z,) = others
        scaled = term is argument(source, 0)  # ``other`` is what alpha multiplies
        if is_like(z, term) and (scaled or alpha == 1):
            return _call_residual(rewriter, relu, bound(term), z, alpha)
    return None


def _call_residual(
    rewriter: Rewriter, relu: fx.Node, given: dict[str, Any], z: fx.Node, alpha: float
) -> fx.Node | None:
    """Return the fused call adds one bias: if the residual is a convolution too, its bias is added to the other one."""
    joined = _sum_of_biases(rewriter, given, z, alpha)
    if joined is not None:
        given = given | {"bias": rewriter.constant(joined, at=relu)}
    fused = _call(rewriter, relu, aten.cudnn_convolution_add_relu.default, given, (z, alpha))
    if fused is not None and joined is not None:
        z.args = (*z.args[:2], None, *z.args[3:])
    return fused


def _sum_of_biases(rewriter: Rewriter, given: dict[str, Any], z: fx.Node, alpha: float) -> torch.Tensor | None:
    if not is_call(z, CONVOLUTION) or only_user(z) is None:
        return None
    own, other = (rewriter.value(bias) for bias in (given["bias"], argument(z, 2)))
    if other is None or (own is None and given["bias"] is not None):
        return None
    total = alpha * other.double() if own is None else own.double() + alpha * other.double()
    rounded = total.to(other.dtype)
    return rounded if bool(rounded.isfinite().all()) else None


def _can_fuse(rewriter: Rewriter, node: fx.Node) -> bool:
    if not is_call(node, CONVOLUTION):
        return False
    given = bound(node)
    weight, bias = rewriter.value(given["weight"]), given["bias"]
    return (
        not given["transposed"]
        and weight is not None
        and (bias is None or fake(bias).dtype == weight.dtype)
        and fake(node).dtype == weight.dtype
        and weight.dtype in DTYPES
        and weight.dim() == fake(node).dim()
        and is_well_grouped(node)
    )


def _call(
    rewriter: Rewriter, relu: fx.Node, target: Any, given: dict[str, Any], residual: tuple[Any, ...]
) -> fx.Node | None:
    bias = given["bias"]
    # Without a bias, the call would fill zeros on the device in each run.
    if bias is None:
        weight = rewriter.value(given["weight"])
        assert weight is not None
        bias = rewriter.constant(torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device), at=relu)
    geometry = (given["stride"], given["padding"], given["dilation"], given["groups"])
    call = rewriter.call(target, given["input"], given["weight"], *residual, bias, *geometry, at=relu)
    if _serves(call, rewriter):
        return call
    rewriter.graph.erase_node(call)
    return None


def _serves(call: fx.Node, rewriter: Rewriter) -> bool:
    """Return whether the library has a kernel for the call, by trying it; always True without a device."""
    if fake(call).device.type != "cuda":
        return True
    example = {node: _example(rewriter, node) for node in call.all_input_nodes}
    try:
        called(call, example.__getitem__)
    except RuntimeError:
        return False
    return True


def _example(rewriter: Rewriter, node: fx.Node) -> torch.Tensor:
    value = rewriter.value(node)
    like = fake(node)
    if value is not None:
        return value
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return empty.zero_()
