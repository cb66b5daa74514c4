"""Group norms of large images: one Triton kernel for the moments, and pointwise calls that a generated kernel computes.

A generated kernel alone would divide such a sum among three launches.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call
from nimblec.graph.vocabulary import DTYPES
from nimblec.kernels.call import Call, zero_counters
from nimblec.kernels.gpu import Trigger
from nimblec.kernels.images import ALIGNMENT_NBYTES, is_read_well, is_within_reach
from nimblec.kernels.reductions.group_norm_op import Groups, GroupTiling, group_candidates, group_moments, groups_of
from nimblec.kernels.selector import Choose, Family

aten = torch.ops.aten

_LARGE = 8192
"""Numbers of a group up to which one generated kernel computes all (`reduction_split_factor` of torch._inductor)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupNormRequest:
    """A group norm of ``x``, whose ``result`` is its first one."""

    shape: Groups
    eps: float
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    result: fx.Node

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""
        return f"group norm {self.shape} {fake(self.x).dtype}"


def requests(module: fx.GraphModule) -> Iterator[GroupNormRequest]:
    """Yield all group norms of images channels last whose other results are not read."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(aten.native_group_norm.default):
        request = _request(node)
        if request is not None:
            yield request


def _request(node: fx.Node) -> GroupNormRequest | None:
    given, users = bound(node), list(node.users)
    x = given["input"]
    # The library's kernel reads contiguous images alone.
    if is_call(x, aten.clone.default) and is_read_well(fake(argument(x, 0))):
        x = argument(x, 0)
    if len(users) != 1 or users[0].args[1] != 0 or fake(x).dtype not in DTYPES or not is_read_well(fake(x)):
        return None
    shape = groups_of(fake(x), given["group"])
    is_wide = shape.channels * fake(x).dtype.itemsize >= ALIGNMENT_NBYTES
    if not is_wide or shape.pixels * shape.channels <= _LARGE or not is_within_reach(fake(x)):
        return None
    return GroupNormRequest(
        shape=shape, eps=given["eps"], x=x, weight=given["weight"], bias=given["bias"], result=users[0]
    )


def call(request: GroupNormRequest, tiling: GroupTiling, trigger: Trigger) -> Call:
    """Return the call that computes the moments of a request."""
    counters = zero_counters(request.shape.rows, fake(request.x).device)
    settings = request.shape.groups, request.eps, tiling.numbers, trigger
    return Call(op=group_moments, args=(request.x, counters, *settings))


def use_group_moments(
    module: fx.GraphModule, choose: Choose[GroupNormRequest, GroupTiling], trigger: Trigger = "late"
) -> None:
    """Compute the moments of group norms by one launch each, with a tiling that is chosen."""
    rewriter = Rewriter(module)
    for request in requests(module):
        tiling = choose(request)
        if tiling is not None:
            moments = call(request, tiling, trigger).put(rewriter, at=request.result)
            rewriter.replace(request.result, _normalized(rewriter, request, moments))
    rewriter.finish()


def _normalized(rewriter: Rewriter, request: GroupNormRequest, moments: fx.Node) -> fx.Node:
    """Return the norm of a request, from its moments, in pointwise calls."""
    x, shape, at = fake(request.x), request.shape, request.result

    def put(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return rewriter.call(op, *args, at=at, **kwargs)

    grouped = [shape.images, shape.groups, shape.channels, *x.shape[2:]]
    value = put(aten.reshape.default, put(aten._to_copy.default, request.x, dtype=torch.float32), grouped)
    for op, index in ((aten.sub.Tensor, 0), (aten.mul.Tensor, 1)):
        moment = put(aten.reshape.default, put(operator.getitem, moments, index), [*grouped[:2], 1, 1, 1])
        value = put(op, value, moment)
    value = put(aten.reshape.default, value, list(x.shape))
    for op, factor in ((aten.mul.Tensor, request.weight), (aten.add.Tensor, request.bias)):
        if factor is not None:
            value = put(op, value, put(aten.reshape.default, factor, [x.shape[1], 1, 1]))
    return put(aten._to_copy.default, value, dtype=x.dtype, memory_format=torch.contiguous_format)


GROUP_NORM: Family[GroupNormRequest, GroupTiling] = Family(
    name="group_norm",
    requests=requests,
    tilings=lambda request, gpu: group_candidates(request.shape, gpu),
    call=call,
    use=use_group_moments,
    templates=("nimblec.kernels.reductions.group_norm_template",),
    reason="images lie channels last by then",
)
