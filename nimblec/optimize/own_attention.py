"""Attention calls as launches of our own kernel, which reads and writes what lies around them in place."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from nimblec.graph.outputs import output_strides, restore_strides, separate_outputs
from nimblec.graph.rewriter import Rewriter, bound, fake, is_call
from nimblec.graph.simplify import simplify
from nimblec.graph.vocabulary import ATTENTION, BY_STRIDE, DTYPES, RESHAPES
from nimblec.kernels.attention import (
    Attention,
    AttentionTiling,
    attention,
    attention_candidates,
    attention_job,
    attention_settings,
    attention_shape,
)
from nimblec.kernels.choosing import Choice
from nimblec.kernels.compiling import Job
from nimblec.kernels.launching import Trigger
from nimblec.optimize.own_selection import HOPPER, Call, TilingSelector, Times, dtype_name

aten = torch.ops.aten

SIZES = range(4, 129, 4)
"""Head sizes that our kernel is made for."""
LONGEST = 4096
"""Keys; longer sequences are the framework's, whose kernels are made for them."""

_MASKS = {*DTYPES, torch.bool}
_COPIES = (aten.clone.default, aten.contiguous.default, aten.expand.default, *RESHAPES)
"""Calls that keep the order of the elements, where expansion changes no shape."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """An attention call ``node`` that one launch of ours could compute, and what that would read."""

    node: fx.Node
    shape: Attention
    scale: float
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, keys, values and the result."""
        return fake(self.node).dtype

    @property
    def mask_dtype(self) -> torch.dtype | None:
        """None without a mask."""
        return None if self.mask is None else fake(self.mask).dtype

    @property
    def signature(self) -> str:
        """What tells requests apart."""
        return f"attention {self.shape} {self.scale} {self.dtype} {self.mask_dtype}"


Choose = Callable[[Request], AttentionTiling | None]
"""How to cut a request's work; None where the framework's call is to stay."""


def use_own_attention(module: fx.GraphModule, choose: Choose, *, trigger: Trigger = "late") -> None:
    """Replace the calls that ``choose`` finds faster; outputs keep their dtype, shape and strides.

    Results are laid out (batch, queries, heads, size), so that the transpose after them is free.
    Launches with a ``trigger`` wait for the kernel before them by themselves: compute capability 9.0.
    """
    strides = output_strides(module)
    rewriter = Rewriter(module)
    found = [(request, tiling) for request in requests(module) if (tiling := choose(request)) is not None]
    for request, tiling in found:
        _replace(rewriter, request, tiling, trigger=trigger)
    if not found:
        return
    for node in rewriter.calls(*RESHAPES):
        node.target = aten.reshape.default  # right whatever the new strides are
    rewriter.propagate()
    simplify(module)
    rewriter.propagate()
    restore_strides(module, strides)
    separate_outputs(module)


def requests(module: fx.GraphModule) -> Iterator[Request]:
    """What `use_own_attention` would ask about, so that it can be prepared all at once."""
    rewriter = Rewriter(module)
    fixed = any(node.target in BY_STRIDE for node in module.graph.nodes)
    for node in rewriter.calls(ATTENTION):
        request = _request(node)
        if request and (not fixed or fake(node).stride() == _strides(fake(node))):
            yield request


def _strides(result: Tensor) -> tuple[int, ...]:
    """Where our kernel puts (batch, heads, queries, size)."""
    return torch.empty_like(result.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2).stride()


def _request(node: fx.Node) -> Request | None:
    given = bound(node)
    query, key, value = (_uncopied(given[name]) for name in ("query", "key", "value"))
    mask, causal = given["attn_mask"], bool(given["is_causal"])
    if given["dropout_p"] or (causal and mask is not None) or not _is_served(node, query, key, value):
        return None
    if mask is not None and (fake(mask).dtype not in _MASKS or fake(mask).dim() > 4):
        return None
    tensors = (fake(query), fake(key), fake(value), None if mask is None else fake(mask))
    shape = attention_shape(*tensors, causal=causal)
    if max(shape.spans) >= 1 << 31 or shape.keys > LONGEST:
        return None
    scale = 1 / math.sqrt(shape.size) if given["scale"] is None else float(given["scale"])
    return Request(node=node, shape=shape, scale=scale, query=query, key=key, value=value, mask=mask)


def _is_served(node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node) -> bool:
    """Four axes, head sizes that fit tiles, and no broadcast but of heads."""
    q, k, v = fake(query), fake(key), fake(value)
    return (
        all(tensor.dim() == 4 and tensor.dtype == q.dtype for tensor in (q, k, v))
        and q.dtype in DTYPES
        and bool(fake(node).numel())
        and k.shape[2] > 0
        and q.shape[3] in SIZES
        and v.shape[3] in SIZES
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1]
        and q.shape[1] % k.shape[1] == 0
    )


def _uncopied(node: fx.Node) -> fx.Node:
    """The same values as they lay before they were copied into another order: any strides can be read."""
    best = source = node
    while is_call(source, *_COPIES):
        argument: fx.Node = source.args[0]  # type: ignore[assignment]
        if is_call(source, aten.expand.default) and fake(argument).shape != fake(source).shape:
            break
        source = argument
        if fake(source).shape == fake(node).shape:
            best = source
    return best


def _replace(rewriter: Rewriter, request: Request, tiling: AttentionTiling, *, trigger: Trigger) -> None:
    node = request.node
    read = (request.query, request.key, request.value, request.mask)
    how = (request.shape.causal, request.scale, tiling.numbers, trigger)
    call = rewriter.call(attention, *read, *how, at=node)
    rewriter.replace(node, rewriter.call(aten.transpose.int, call, 1, 2, at=node))


def select_own_attention(
    module: fx.GraphModule, cache: Times | None = None, *, trigger: Trigger = "late"
) -> Mapping[str, Choice]:
    """Put our own attention in wherever it is faster on this GPU; what was chosen, by request.

    Times that the ``cache`` has are not measured again.
    """
    found = list(requests(module))
    if not found or torch.cuda.get_device_capability() < HOPPER:
        return {}
    selector = AttentionSelector.prepared(found, "attention", cache, trigger)
    use_own_attention(module, selector, trigger=trigger)
    return selector.choices


class AttentionSelector(TilingSelector[Request, AttentionTiling]):
    """A `choose` for `use_own_attention`."""

    def tilings(self, request: Request) -> Sequence[AttentionTiling]:
        """The candidates."""
        return attention_candidates(request.shape, itemsize=request.dtype.itemsize)

    def job(self, request: Request, tiling: AttentionTiling) -> Job:
        """As our call launches it."""
        settings = attention_settings(request.shape, tiling, scale=request.scale, trigger=self.trigger)
        mask = None if request.mask_dtype is None else dtype_name(request.mask_dtype)
        return attention_job(settings, dtype=dtype_name(request.dtype), mask=mask)

    def theirs(self, request: Request) -> Call:
        """The framework's call, on arguments that lie as it is given them."""
        given = bound(request.node)
        read = [_example(given[name]) for name in ("query", "key", "value", "attn_mask")]
        how = {name: given[name] for name in ("scale", "enable_gqa")}
        return lambda _: ATTENTION(*read, 0.0, request.shape.causal, **how)

    def ours(self, request: Request, tiling: AttentionTiling) -> Call:
        """Our call."""
        read = [_example(node) for node in (request.query, request.key, request.value, request.mask)]
        how = (request.shape.causal, request.scale, tiling.numbers, self.trigger)
        return lambda _: attention(*read, *how)


def _example(node: fx.Node | None) -> Tensor | None:
    """Random numbers that lie as the node's value does; bits are all ones."""
    if node is None:
        return None
    like = fake(node)
    span = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    flat = torch.ones(span, dtype=like.dtype, device=like.device)
    if like.dtype.is_floating_point:
        flat.normal_()
    return flat.as_strided(like.shape, like.stride())
