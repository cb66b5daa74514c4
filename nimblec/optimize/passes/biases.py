"""Biases of convolutions, which add them by a kernel of their own, are added by the calls that follow instead."""

from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.fusible import is_fusible
from nimblec.graph.rewriter import Rewriter, argument_names, bound, fake, is_call
from nimblec.graph.views import is_view
from nimblec.graph.vocabulary import CONVOLUTION, CONVOLUTIONS

aten = torch.ops.aten


def free_biases(module: fx.GraphModule) -> None:
    """Take the bias out of a convolution where every call that reads the result can add it.

    Generated kernels add it to what they read. A convolution without padding has what it would compute
    from the bias added to its own bias ahead of time.
    """
    rewriter = Rewriter(module)
    rewriter.propagate()
    for node in rewriter.calls(CONVOLUTION):
        bias = rewriter.value(bound(node)["bias"])
        if bias is None or fake(node).dtype != bias.dtype or fake(node).dim() != fake(bound(node)["weight"]).dim():
            continue
        convolutions = [user for user in node.users if is_call(user, *CONVOLUTIONS)]
        moved = [_moved(rewriter, node, user, bias) for user in convolutions]
        others = [user for user in node.users if user not in convolutions]
        if all(m is not None for m in moved) and all(map(_adds, others)):
            _free(rewriter, node, bias, {c: m for c, m in zip(convolutions, moved, strict=True) if m is not None})
    rewriter.finish()


def _adds(user: fx.Node) -> bool:
    """Return whether generated kernels compute a call; of a view, all its readers."""
    return all(map(_adds, user.users)) if is_view(user) else is_fusible(user)


def _free(rewriter: Rewriter, node: fx.Node, bias: Tensor, moved: dict[fx.Node, Tensor]) -> None:
    """Take the bias out; ``moved`` are the new biases of the convolutions that follow."""
    plain = rewriter.call(CONVOLUTION, *node.args[:2], None, *node.args[3:], at=node)
    for user, total in moved.items():
        _set_bias(user, rewriter.constant(total, at=user))
        user.replace_input_with(node, plain)
    if node.users:
        column = rewriter.constant(bias.reshape(-1, *[1] * (fake(node).dim() - 2)), at=node)
        plain = rewriter.call(aten.add.Tensor, plain, column, at=node)
    rewriter.replace(node, plain)


def _moved(rewriter: Rewriter, node: fx.Node, user: fx.Node, bias: Tensor) -> Tensor | None:
    """Return the bias that makes up in ``user``, a convolution, for ``node`` without its bias; None where none does."""
    given = bound(user)
    weight, own = rewriter.value(given["weight"]), rewriter.value(given["bias"])
    reads = [name for name, value in given.items() if value is node]
    if weight is None or (own is None and given["bias"] is not None) or reads not in (["input"], ["self"]):
        return None
    if not _is_valid(user, given, weight) or weight.dtype != bias.dtype:
        return None
    groups = given["groups"]
    sums = weight.double().flatten(2).sum(-1).reshape(groups, -1, weight.shape[1])
    total = (sums @ bias.double().reshape(groups, -1, 1)).reshape(-1)
    rounded = (total if own is None else total + own.double()).to(bias.dtype)
    return rounded if bool(rounded.isfinite().all()) else None


def _is_valid(user: fx.Node, given: dict[str, Any], weight: Tensor) -> bool:
    """Return whether no window of a convolution reads padding, which has no bias."""
    return not given.get("transposed") and not any(given["padding"]) and fake(user).dim() == weight.dim()


def _set_bias(convolution: fx.Node, bias: fx.Node) -> None:
    convolution.update_arg(argument_names(convolution).index("bias"), bias)
