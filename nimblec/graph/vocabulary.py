"""The vocabulary of passes: groups of dtypes, groups of calls, and predicates of calls."""

from collections.abc import Mapping

import torch
from torch import fx
from torch._ops import OpOverload

from nimblec.graph.rewriter import bound, fake, is_call

aten = torch.ops.aten

HALF = frozenset({torch.float16, torch.bfloat16})
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of fused library calls and Triton kernels."""

CONVOLUTION = aten.convolution.default
CONVOLUTIONS = (
    CONVOLUTION,
    aten.cudnn_convolution_relu.default,
    aten.cudnn_convolution_add_relu.default,
)
CONVOLUTION_BACKWARD = aten.convolution_backward.default
POOLS = (aten.max_pool2d_with_indices.default, aten.avg_pool2d.default)
LINEARS = (aten.addmm.default, aten.mm.default)
PRODUCTS = (*LINEARS, aten._addmm_activation.default)
ATTENTION = aten.scaled_dot_product_attention.default
NORMS = (
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
)
"""Batch norms."""

RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
TRANSPOSES = (aten.permute.default, aten.transpose.int, aten.t.default)
WHOLE_VIEWS = (
    *RESHAPES,
    *TRANSPOSES,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
"""Calls whose result has each element of their first argument once; reshapes may copy."""
BY_STRIDE = frozenset(
    {
        aten.as_strided.default,
        aten.view.dtype,
        aten.view_as_real.default,
        aten.view_as_complex.default,
        aten._reshape_alias.default,
        aten.as_strided_copy.default,
        aten.new_empty_strided.default,
        aten.empty_strided.default,
    }
)
"""Calls whose meaning depends on the strides of their argument."""

ALLOCATIONS = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
"""Calls that return memory as it is."""

LEAKY = "leaky_relu "
"""The kernels' name of a leaky ReLU, before its slope."""
_ACTIVATIONS: Mapping[OpOverload, str] = {
    aten.relu6.default: "relu6",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
}


def is_like(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two values have the same dtype and shape."""
    return (fake(node).dtype, fake(node).shape) == (fake(other).dtype, fake(other).shape)


def is_tagged_pointwise(node: fx.Node) -> bool:
    """Return whether torch tags a call as pointwise: each element of its result depends on those at its place alone."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def is_relu(node: fx.Node) -> bool:
    """Return whether a call is max(x, 0), by whatever name."""
    if is_call(node, aten.relu.default):
        return True
    if not is_call(node, aten.clamp.default, aten.clamp_min.default):
        return False
    given = bound(node)
    return given["min"] is not None and given["min"] == 0 and given.get("max") is None


def activation_of(node: fx.Node) -> str | None:
    """Return the kernels' name of the activation that a call computes; None where they have none."""
    if is_relu(node):
        return "relu"
    if is_call(node, aten.hardtanh.default, aten.clamp.default):
        given = bound(node)
        low, high = given.get("min_val", given.get("min")), given.get("max_val", given.get("max"))
        return "relu6" if (low, high) == (0, 6) else None
    if is_call(node, aten.leaky_relu.default):
        return f"{LEAKY}{bound(node)['negative_slope']}"
    if is_call(node, aten.gelu.default):
        return "gelu" if bound(node)["approximate"] == "none" else "gelu_tanh"
    return _ACTIVATIONS.get(node.target) if node.op == "call_function" else None  # type: ignore[call-overload]


def is_well_grouped(convolution: fx.Node) -> bool:
    """Return whether cuDNN has fast kernels for the groups of a convolution.

    That is one group, or groups of 4, 8, 16 ... channels with as many results.
    """
    weight, groups = fake(bound(convolution)["weight"]), bound(convolution)["groups"]
    made, read = weight.shape[0] // groups, weight.shape[1]
    return bool(groups == 1 or (read == made and read >= 4 and read & (read - 1) == 0))
