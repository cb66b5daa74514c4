"""Triton attention in a graph: what it takes, that the values stay, that nothing is copied, how tilings are chosen."""

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rewriting import counts, optimize, random_half, record, rewritten, run
from torch import Tensor, fx
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from nimblec.graph.rewriter import Rewriter, is_call
from nimblec.graph.views import is_view
from nimblec.graph.vocabulary import LINEARS
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.attention_rewrite import AttentionRequest, requests, use_triton_attention
from nimblec.kernels.reductions.attention_shapes import attention_shape
from nimblec.kernels.reductions.attention_tilings import AttentionTiling

if TYPE_CHECKING:
    from collections.abc import Callable


COMPUTED = (*LINEARS, torch.ops.aten.bmm.default, torch.ops.aten.add.Tensor)
TILING = AttentionTiling(block_m=16, block_n=32)


WIDTH, HEADS = 48, 3
QUERY, KEY, VALUE, OUT = (random_half(WIDTH, WIDTH, seed=seed) / WIDTH**0.5 for seed in range(4))
VECTORS = random_half(3, WIDTH, seed=5)


def _split(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _projected(x: Tensor, other: Tensor | None = None) -> "tuple[Tensor, Tensor, Tensor]":
    source = x if other is None else other
    query = functional.linear(x, QUERY, VECTORS[0])
    return (
        _split(query),
        _split(functional.linear(source, KEY, VECTORS[1])),
        _split(functional.linear(source, VALUE, VECTORS[2])),
    )


def _bert(x: Tensor) -> Tensor:
    """Products and a softmax, as exports write them."""
    query, key, value = _projected(x)
    scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
    return functional.linear(_join(torch.softmax(scores, -1) @ value), OUT)


def _gpt2(x: Tensor) -> Tensor:
    joined = functional.linear(x, torch.cat([QUERY, KEY, VALUE])).split(WIDTH, dim=2)
    query, key, value = (_split(part) for part in joined)
    return functional.linear(_join(scaled_dot_product_attention(query, key, value, is_causal=True)), OUT)


def _vit(x: Tensor) -> Tensor:
    """Attend as timm does: one product, with queries, keys and values along an axis of their own."""
    joined = functional.linear(x, torch.cat([QUERY, KEY, VALUE])).reshape(*x.shape[:2], 3, HEADS, -1)
    query, key, value = joined.permute(2, 0, 3, 1, 4).unbind(0)
    return functional.linear(_join(scaled_dot_product_attention(query, key, value)), OUT)


def _batch_second(x: Tensor) -> Tensor:
    """Attend to rows (length, batch, width), as `torch.nn.MultiheadAttention` does by default."""
    products = (functional.linear(x, *each) for each in zip((QUERY, KEY, VALUE), VECTORS, strict=True))
    query, key, value = (each.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for each in products)
    return functional.linear(scaled_dot_product_attention(query, key, value).permute(2, 0, 1, 3).flatten(2), OUT)


def _t5(x: Tensor) -> Tensor:
    """Return a bias for each head, no scale."""
    query, key, value = _projected(x)
    bias = random_half(1, HEADS, x.shape[1], x.shape[1], seed=7)
    weights = torch.softmax((query @ key.transpose(3, 2) + bias).float(), -1).type_as(x)
    return functional.linear(_join(weights @ value), OUT)


def _cross(x: Tensor) -> Tensor:
    query, key, value = _projected(x, x[:, 2:5])
    return functional.linear(_join(scaled_dot_product_attention(query, key, value, scale=0.3)), OUT)


def _computed_mask(x: Tensor) -> Tensor:
    keep = (x[:, None, None, :, 0] > -1.0) | (torch.arange(x.shape[1]) == 0)
    return _join(scaled_dot_product_attention(*_projected(x), attn_mask=keep))


def _shared_keys(x: Tensor) -> Tensor:
    query, key, value = _projected(x)
    return _join(scaled_dot_product_attention(query, key[:, :1], value[:, :1], enable_gqa=True))


def _repeated_keys(x: Tensor) -> Tensor:
    """Repeat each head of keys and values, as transformers does."""
    query, key, value = _projected(x)
    key, value = (part[:, :1, None].expand(-1, -1, HEADS, -1, -1).flatten(1, 2) for part in (key, value))
    return _join(scaled_dot_product_attention(query, key, value))


def _copied(x: Tensor) -> Tensor:
    query, key, value = (part.contiguous() for part in _projected(x))
    return _join(scaled_dot_product_attention(query, key, value))


MODELS: "dict[str, Callable[[Tensor], Tensor]]" = {
    "bert": _bert,
    "gpt2": _gpt2,
    "vit": _vit,
    "batch second": _batch_second,
    "t5": _t5,
    "cross": _cross,
    "computed mask": _computed_mask,
    "shared keys": _shared_keys,
    "repeated keys": _repeated_keys,
    "copied": _copied,
    "returned": lambda x: scaled_dot_product_attention(*(part.contiguous() for part in _projected(x))),
}


def _graph(name: str, batch: int) -> tuple[fx.GraphModule, Tensor]:
    x = random_half(batch, 7, WIDTH, seed=9)
    return optimize(record(MODELS[name], x), device="cuda"), x


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_no_copies(name: str, batch: int) -> None:
    module, x = _graph(name, batch)
    own = rewritten(module, lambda m: use_triton_attention(m, lambda _: TILING))
    (call,) = (node for node in own.graph.nodes if node.target is attention)
    for expected, result in zip(run(module, x), run(own, x), strict=True):
        torch.testing.assert_close(result, expected, atol=4e-3, rtol=4e-3)
        assert result.stride() == expected.stride()
    if name != "returned":
        assert _is_in_place(own, call), own.graph


def test_attention_reads_the_result_of_another_directly() -> None:
    x = random_half(1, 2, 8, 16)

    def model(x: Tensor) -> Tensor:
        for _ in range(2):
            x = scaled_dot_product_attention(x, x, x)
        return x

    before = record(model, x)
    after = rewritten(before, lambda m: use_triton_attention(m, lambda _: TILING))
    assert counts(after)["attention"] == 2
    torch.testing.assert_close(run(after, x)[0], run(before, x)[0], atol=4e-3, rtol=4e-3)


def _is_in_place(module: fx.GraphModule, call: fx.Node) -> bool:
    """Return whether there are views alone between linears and the call on both sides."""
    Rewriter(module).propagate()
    (end,) = call.users
    while is_view(end):
        (end,) = end.users
    starts = list(call.args[:3])
    while any(is_view(start) for start in starts):
        starts = [start.args[0] if is_view(start) else start for start in starts]
    return (end.op == "output" or is_call(end, *COMPUTED)) and all(is_call(start, *COMPUTED) for start in starts)


def test_what_our_kernel_does_not_take() -> None:
    def asked(q: Tensor, k: Tensor, **how: Any) -> int:
        module = record(lambda q, k: scaled_dot_product_attention(q, k, k, **how), q, k)
        return len(list(requests(module)))

    x = random_half(1, 2, 8, 16)
    assert asked(x, x) == 1
    assert asked(x.float(), x.float()) == 1
    assert asked(x.double(), x.double()) == 0
    assert asked(random_half(1, 2, 8, 20), random_half(1, 2, 8, 20)) == 1
    assert asked(random_half(1, 2, 8, 18), random_half(1, 2, 8, 18)) == 0
    assert asked(random_half(1, 1, 1, 16), random_half(1, 1, 5000, 16)) == 0
    assert asked(x[0], x[0]) == 0
    assert asked(x, x, dropout_p=0.5) == 0


def test_the_mask_of_a_shape_is_broadcast() -> None:
    x = random_half(2, 3, 5, 16)
    shape = attention_shape(x, x, x, torch.zeros(2, 1, 1, 5), causal=False)
    assert shape.mask_strides == (5, 0, 0, 1)
    assert attention_shape(x, x, x, torch.zeros(5, 5), causal=False).mask_strides == (0, 0, 5, 1)


def test_requests_say_what_they_ask() -> None:
    (request,) = requests(_graph("t5", 1)[0])
    assert isinstance(request, AttentionRequest)
    assert (request.scale, request.dtype, request.mask_dtype) == (1.0, torch.float16, torch.float16)
    assert request.shape.query_strides[2] == 3 * WIDTH, "read in the joined product"
