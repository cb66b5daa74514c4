"""Pooling calls that one launch could compute, with the activation after them."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, bound, fake, is_call, only_user
from nimblec.graph.vocabulary import DTYPES, POOLS, activation_of
from nimblec.kernels.alone import alone
from nimblec.kernels.images import is_within_reach
from nimblec.kernels.reductions.pool_op import pooling_shape
from nimblec.kernels.reductions.pool_shapes import Kind, Means, Pooling, lies_channels_last, means_of
from nimblec.kernels.shapes import Pair

aten = torch.ops.aten

MAX, AVERAGE = POOLS
ADAPTIVE, MEAN = aten._adaptive_avg_pool2d.default, aten.mean.dim


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolRequest:
    """Calls that one launch could compute; the last one is the result.

    ``kind`` is None for means over all pixels. The result lies ``channels_last`` or contiguous.
    """

    x: fx.Node
    shape: Pooling | Means
    kind: Kind | None
    channels_last: bool
    calls: tuple[fx.Node, ...]
    divisor: int | None = None
    activation: str = "none"

    @property
    def result(self) -> fx.Node:
        """The last call, which the launch replaces."""
        return self.calls[-1]

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The values that are read."""
        return (self.x,)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The values that others read."""
        return (self.result,)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is read and written."""
        return fake(self.x).dtype

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""
        calls = " ".join(str(call.target) for call in self.calls)
        return f"pool {self.shape} {self.kind} {self.divisor} {self.activation} {self.dtype} {calls}"


def requests(module: fx.GraphModule) -> Iterator[PoolRequest]:
    """Yield all requests in a graph, in its order.

    Those that a generated kernel would compute together with other calls are left to it.
    """
    rewriter = Rewriter(module)
    rewriter.propagate()
    found = (_request(node) for node in rewriter.calls(MAX, AVERAGE, ADAPTIVE, MEAN))
    yield from alone([_with_activation(request) for request in found if request is not None])


def _request(node: fx.Node) -> PoolRequest | None:
    x: fx.Node = bound(node)["self"]
    like = fake(x)
    if like.dim() != 4 or like.dtype not in DTYPES or not like.numel() or not is_within_reach(like):
        return None
    if not like.is_contiguous() and not lies_channels_last(like):
        return None
    if is_call(node, MAX):
        request = _maxima(node, x)
    elif is_call(node, AVERAGE):
        request = _averages(node, x)
    else:
        request = _adaptive(node, x) if is_call(node, ADAPTIVE) else _mean(node, x)
    return request if request is not None and _is_laid(request) else None


def _maxima(node: fx.Node, x: fx.Node) -> PoolRequest | None:
    """Return the request of a max pooling whose indices nothing reads."""
    given = bound(node)
    result = next(iter(node.users), None)
    if result is None or len(node.users) > 1 or result.target is not operator.getitem or result.args[1] != 0:
        return None
    geometry = (_stride(given), _pair(given["padding"]), _pair(given["dilation"]))
    return _windows((node, result), x, "max", _pair(given["kernel_size"]), *geometry, is_ceil=given["ceil_mode"])


def _averages(node: fx.Node, x: fx.Node) -> PoolRequest | None:
    """Return the request of an average pooling; the kernel takes no negative divisor."""
    given = bound(node)
    kernel, padding, divisor = _pair(given["kernel_size"]), _pair(given["padding"]), given["divisor_override"]
    if divisor is not None and divisor < 0:
        return None
    if kernel == fake(x).shape[2:] and fake(node).shape[2:] == (1, 1) and padding == (0, 0) and not divisor:
        return _whole((node,), x)
    kind: Kind = "padded average" if given["count_include_pad"] else "average"
    geometry = (_stride(given), padding, (1, 1))
    request = _windows((node,), x, kind, kernel, *geometry, is_ceil=given["ceil_mode"])
    return replace(request, divisor=divisor)


def _adaptive(node: fx.Node, x: fx.Node) -> PoolRequest | None:
    """Return the request of an adaptive pooling whose windows all have the same size."""
    pairs = list(zip(fake(x).shape[2:], bound(node)["output_size"], strict=True))
    if not all(wanted and size % wanted == 0 for size, wanted in pairs):
        return None
    if all(wanted == 1 for _, wanted in pairs):
        return _whole((node,), x)
    kernel = _pair([size // wanted for size, wanted in pairs])
    return _windows((node,), x, "average", kernel, kernel, (0, 0), (1, 1))


def _mean(node: fx.Node, x: fx.Node) -> PoolRequest | None:
    given = bound(node)
    if sorted(axis % 4 for axis in given["dim"] or ()) != [2, 3] or fake(node).dtype != fake(x).dtype:
        return None
    return _whole((node,), x)


def _windows(
    calls: tuple[fx.Node, ...],
    x: fx.Node,
    kind: Kind,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    *,
    is_ceil: bool = False,
) -> PoolRequest:
    shape = pooling_shape(fake(x), kernel, stride, padding, dilation, is_ceil)
    return PoolRequest(calls=calls, x=x, shape=shape, kind=kind, channels_last=lies_channels_last(fake(x)))


def _whole(calls: tuple[fx.Node, ...], x: fx.Node) -> PoolRequest:
    """Return the request of means over all pixels, with the layout of the framework's result."""
    result = fake(calls[-1])
    channels_last = result.dim() == 4 and result.stride() == _strides(result, channels_last=True)
    return PoolRequest(calls=calls, x=x, shape=means_of(fake(x)), kind=None, channels_last=channels_last)


def _is_laid(request: PoolRequest) -> bool:
    """Return whether the kernels' result has the strides of torch's, which vary for images of one pixel or channel."""
    result = fake(request.result)
    return bool(result.numel()) and result.stride() == _strides(result, channels_last=request.channels_last)


def _strides(like: Tensor, *, channels_last: bool) -> tuple[int, ...]:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(like.shape, device="meta", memory_format=memory_format).stride()


def _with_activation(request: PoolRequest) -> PoolRequest:
    """Add the only reader of the result, if it is an activation."""
    user = only_user(request.result)
    activation = None if user is None else activation_of(user)
    if user is None or activation is None:
        return request
    a, b = fake(user), fake(request.result)
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return request
    return replace(request, calls=(*request.calls, user), activation=activation)


def _stride(given: Mapping[str, Any]) -> Pair:
    """Return the stride; by default the size of the window."""
    return _pair(given["stride"] or given["kernel_size"])


def _pair(numbers: Sequence[int]) -> Pair:
    """Return a number for each axis; a single one is for both."""
    first, *rest = numbers
    return first, rest[0] if rest else first
