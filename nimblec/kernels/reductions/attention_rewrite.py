"""Attention calls as launches of one Triton kernel, which reads and writes its neighbours' layouts in place."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.outputs import output_strides, restore_strides, separate_outputs
from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call
from nimblec.graph.simplify import simplify
from nimblec.graph.vocabulary import ATTENTION, BY_STRIDE, DTYPES, RESHAPES
from nimblec.kernels.call import Call, Pool, example
from nimblec.kernels.gpu import Trigger
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.attention_shapes import Attention, attention_shape
from nimblec.kernels.reductions.attention_tilings import AttentionTiling, attention_candidates
from nimblec.kernels.selector import Choose, Family, Timed

aten = torch.ops.aten

SIZES = range(4, 129, 4)
"""Head sizes that the kernel supports."""
LONGEST = 4096
"""Keys; longer sequences are left to the framework, whose kernels are made for them."""

_MASKS = {*DTYPES, torch.bool}
_COPIES = (aten.clone.default, aten.contiguous.default, aten.expand.default, *RESHAPES)
"""Calls that keep the order of the elements, provided that an expansion changes no shape."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionRequest:
    """An attention call ``node`` that one launch could compute, and the values that it would read."""

    node: fx.Node
    shape: Attention
    scale: float
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries, keys, values and the result."""
        return fake(self.node).dtype

    @property
    def mask_dtype(self) -> torch.dtype | None:
        """The dtype of the mask; None without one."""
        return None if self.mask is None else fake(self.mask).dtype

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""
        return f"attention {self.shape} {self.scale} {self.dtype} {self.mask_dtype}"


def use_triton_attention(
    module: fx.GraphModule, choose: Choose[AttentionRequest, AttentionTiling], trigger: Trigger = "late"
) -> None:
    """Compute attention by one launch, which reads any strides in place, where ``choose`` finds it faster.

    Results are laid out (batch, queries, heads, size), or with the batch second where queries have it second, so that
    the transpose after them is free.
    """
    strides = output_strides(module)
    rewriter = Rewriter(module)
    found = [(request, tiling) for request in requests(module) if (tiling := choose(request)) is not None]
    # A later request may read a value that an earlier one replaces.
    for request, tiling in reversed(found):
        at = request.node
        result = call(request, tiling, trigger).put(rewriter, at=at)
        rewriter.replace(at, rewriter.call(aten.transpose.int, result, 1, 2, at=at))
    if not found:
        return
    for node in rewriter.calls(*RESHAPES):
        node.target = aten.reshape.default  # right whatever the new strides are
    rewriter.propagate()
    simplify(module)
    rewriter.propagate()
    restore_strides(module, strides)
    separate_outputs(module)


def requests(module: fx.GraphModule) -> Iterator[AttentionRequest]:
    """Yield all requests in a graph."""
    rewriter = Rewriter(module)
    fixed = any(node.target in BY_STRIDE for node in module.graph.nodes)
    for node in rewriter.calls(ATTENTION):
        request = _request(node)
        if request and (not fixed or fake(node).stride() == _strides(request)):
            yield request


def _strides(request: AttentionRequest) -> tuple[int, ...]:
    """Return the strides of the kernel's result as (batch, heads, queries, size)."""
    sizes = fake(request.node).transpose(1, 2).shape
    return torch.empty_permuted(sizes, request.shape.result_order, device="meta").transpose(1, 2).stride()


def _request(node: fx.Node) -> AttentionRequest | None:
    given = bound(node)
    query, key, value = (_uncopied(given[name]) for name in ("query", "key", "value"))
    kept = _unrepeated(key), _unrepeated(value)
    if fake(kept[0]).shape[1] == fake(kept[1]).shape[1]:
        key, value = kept
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
    return AttentionRequest(node=node, shape=shape, scale=scale, query=query, key=key, value=value, mask=mask)


def _is_served(node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node) -> bool:
    """Return whether there are four axes, supported head sizes, and no broadcast except of heads."""
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
    """Return the values before they were copied into another layout: the kernel reads any strides."""
    best = source = node
    while is_call(source, *_COPIES):
        copied = argument(source, 0)
        if is_call(source, aten.expand.default) and fake(copied).shape != fake(source).shape:
            break
        source = copied
        if fake(source).shape == fake(node).shape:
            best = source
    return best


def _unrepeated(node: fx.Node) -> fx.Node:
    """Return keys or values (batch, heads, keys, size) before each head was repeated for several heads of the query."""
    joined = argument(node, 0) if is_call(node, *RESHAPES) else node
    single = argument(joined, 0) if is_call(joined, aten.expand.default) else joined
    kept = argument(single, 0) if is_call(single, aten.unsqueeze.default) else single
    shapes = [tuple(fake(each).shape) for each in (kept, single, joined, node)]
    if len(shapes[0]) != 4 or len(shapes[2]) != 5:
        return node
    batch, heads, *rest = shapes[0]
    times = shapes[2][2]
    wanted = (batch, heads, 1, *rest), (batch, heads, times, *rest), (batch, heads * times, *rest)
    return kept if tuple(shapes[1:]) == wanted else node


def call(request: AttentionRequest, tiling: AttentionTiling, trigger: Trigger) -> Call:
    """Return the call that computes a request: (batch, queries, heads, size)."""
    read = (request.query, request.key, request.value, request.mask)
    return Call(op=attention, args=(*read, request.shape.causal, request.scale, tiling.numbers, trigger))


def framework(request: AttentionRequest, _pool: Pool, _length: int) -> Timed:
    """Return the framework's call, on arguments with the strides that they have in the graph."""
    given = bound(request.node)
    read = [_example(given[name]) for name in ("query", "key", "value", "attn_mask")]
    how: dict[str, Any] = {name: given[name] for name in ("scale", "enable_gqa")}
    return lambda _: ATTENTION(*read, 0.0, request.shape.causal, **how)


def _example(node: fx.Node | None) -> Tensor | None:
    return None if node is None else example(fake(node), fake(node).device)


ATTENTION_FAMILY: Family[AttentionRequest, AttentionTiling] = Family(
    name="attention",
    requests=requests,
    tilings=lambda request, gpu: attention_candidates(request.shape, gpu, itemsize=request.dtype.itemsize),
    call=call,
    framework=framework,
    use=use_triton_attention,
    templates=("nimblec.kernels.reductions.attention_template",),
    reason="it changes the strides of what products read after it",
)
