"""Which calls a generated kernel can compute together with their neighbours."""

from math import prod

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from nimblec.graph.rewriter import argument, bound, fake, is_pure
from nimblec.graph.state import WRITES_STATE
from nimblec.graph.vocabulary import is_tagged_pointwise

aten = torch.ops.aten

_TAGS = (torch.Tag.pointwise, torch.Tag.reduction)

_POINTWISE = frozenset({
    "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "elu", "softplus", "mish", "log_sigmoid_forward", "prelu",
    "_to_copy", "copy", "full_like", "zeros_like", "ones_like", "masked_fill", "where", "clamp",
})
"""Pointwise calls that not every version of torch tags as such."""

_NAMES = _POINTWISE | frozenset({
    # reductions
    "mean", "sum", "prod", "amax", "amin", "max", "min", "any", "all", "var", "var_mean",
    "_softmax", "_safe_softmax", "_log_softmax", "linalg_vector_norm", "logsumexp",
    # normalisations
    "native_layer_norm", "native_group_norm", "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_fused_rms_norm", "rms_norm",
    # copies and gathers
    "cat", "stack", "clone", "constant_pad_nd", "embedding", "gather", "index", "index_select", "roll", "flip",
    "new_zeros", "repeat", "reshape", "slice_scatter", "select_scatter", "upsample_nearest2d", "upsample_nearest1d",
    "upsample_bilinear2d", "avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d",
    "reflection_pad2d", "reflection_pad2d_backward", "replication_pad2d",
})
"""Names of the aten namespace, for all their overloads without out arguments."""

_POOLS = frozenset({"avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d"})
_STENCILS = _POOLS | {"upsample_bilinear2d", "reflection_pad2d_backward"}

_COPIES = frozenset({"clone", "constant_pad_nd", "reflection_pad2d", "repeat", "replication_pad2d"})

_ONE_LAUNCH = _POOLS | {"mean", "sum", "amax", "amin", "var", "var_mean", "cat"}
"""Calls that ATen computes by one kernel, a few microseconds slower than a generated one."""

_SLOW_ALONE = _STENCILS | _ONE_LAUNCH | {
    "upsample_nearest2d", "upsample_nearest1d", "native_group_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "roll", "flip", "constant_pad_nd",
    "reflection_pad2d", "replication_pad2d", "slice_scatter", "select_scatter", "_safe_softmax",
}
"""Calls that ATen computes by slow kernels or by several."""

LARGEST_WINDOW = 25
"""Elements of the largest pooling window that Inductor generates code for (torch/_inductor/lowering.py)."""


def is_fusible(node: fx.Node) -> bool:
    """Return whether a generated kernel can compute the call: all its results are real tensors, the first not empty."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not is_pure(node):
        return False
    if WRITES_STATE in node.meta or _is_search(node):
        return False
    results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    if not all(isinstance(value, Tensor) and not value.is_complex() for value in results) or not results[0].numel():
        return False
    return any(tag in target.tags for tag in _TAGS) or _name(node) in _NAMES


def is_pointwise(node: fx.Node) -> bool:
    """Return whether each element of the result depends only on those at its place in the broadcast arguments."""
    return is_tagged_pointwise(node) or _name(node) in _POINTWISE


def is_copy(node: fx.Node) -> bool:
    """Return whether each element of the result is one of the argument, in another place, or a constant."""
    return _name(node) in _COPIES


def is_counter(node: fx.Node) -> bool:
    """Return whether a generated kernel can compute the call: one integer or bool, whose bits no kernel changes."""
    value = node.meta["val"]
    is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point()
    return is_one and is_fusible(node) and is_pointwise(node)


def is_stencil(node: fx.Node) -> bool:
    """Return whether each result reads a neighbourhood, so that computing its argument on the fly would repeat work."""
    return _name(node) in _STENCILS


def is_slow_alone(node: fx.Node) -> bool:
    """Return whether a generated kernel is much faster than the call itself, though it computes nothing else."""
    if _name(node) in _SLOW_ALONE:
        return _name(node) not in _POOLS or _window(node) <= LARGEST_WINDOW
    return _is_elementwise(node) and _is_uneven(node)


def is_one_launch(node: fx.Node) -> bool:
    """Return whether ATen computes the call by a single kernel that is not much slower than a generated one."""
    return _name(node) in _ONE_LAUNCH or _is_elementwise(node)


def _is_search(node: fx.Node) -> bool:
    """Return whether places are read, which Inductor (2.11) gets wrong where arguments lie in different orders."""
    if node.target in {aten.max.dim, aten.min.dim}:
        return any(argument(user, 1) == 1 for user in node.users)
    return node.target in {aten.argmax.default, aten.argmin.default}


def _is_elementwise(node: fx.Node) -> bool:
    return is_pointwise(node) or _name(node) == "clone"


def _is_uneven(node: fx.Node) -> bool:
    """Return whether arguments or result differ in shape or strides: ATen then reads element by element."""
    tensors = [fake(node), *map(fake, node.all_input_nodes)]
    return len({(tensor.shape, tensor.stride()) for tensor in tensors}) > 1


def _window(node: fx.Node) -> int:
    """Return how many elements a pooling call reads for each element of its result."""
    given = bound(node)
    if "kernel_size" in given:
        size = given["kernel_size"]
        return prod(size) if len(size) > 1 else size[0] ** 2
    image = fake(given["self"])
    return prod(-(-length // parts) for length, parts in zip(image.shape[-2:], given["output_size"], strict=True))


def _name(node: fx.Node) -> str:
    """Return the name of a call within its namespace; empty where it calls no overload."""
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else ""
