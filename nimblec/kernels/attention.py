"""Attention for short sequences as an op of ours: one launch, read and written where the neighbours have it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from nimblec.kernels.candidates import MULTIPROCESSORS, most_promising
from nimblec.kernels.compiling import Job
from nimblec.kernels.shapes import ceil_div

_LIBRARY = torch.library.Library("nimblec", "FRAGMENT")
"""The op lives as long as this module."""

_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float scale, int[] tiling, "
    "str trigger) -> Tensor"
)

Strides = tuple[int, int, int, int]

_FETCHED_REGISTERS = 128
"""Of a thread's 255, how many may hold keys and values where one step takes them all."""
_SHARED_NBYTES = 200 * 1024
"""Of a multiprocessor's 227 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Queries (batch, heads, queries, size), keys (batch, key heads, keys, size), values (.., keys, value size).

    Strides are in elements; those of the mask broadcast it to (batch, heads, queries, keys), None without one.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    query_strides: Strides
    key_strides: Strides
    value_strides: Strides
    mask_strides: Strides | None
    causal: bool

    @property
    def read_keys(self) -> int:
        """Keys that some query reads."""
        return min(self.keys, self.queries) if self.causal else self.keys

    @property
    def spans(self) -> tuple[int, ...]:
        """How many elements lie between the first and the last of queries, keys, values and results."""
        rows = (self.batch, self.heads, self.queries)
        columns = (self.batch, self.key_heads, self.keys)
        return (
            _span((*rows, self.size), self.query_strides),
            _span((*columns, self.size), self.key_strides),
            _span((*columns, self.value_size), self.value_strides),
            self.batch * self.heads * self.queries * self.value_size,
            _span((*rows, self.keys), self.mask_strides or (0, 0, 0, 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiling:
    """A block computes ``block_m`` queries of a head and reads ``block_n`` keys in each step."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2

    @property
    def numbers(self) -> list[int]:
        """What the op takes as its ``tiling``."""
        return [self.block_m, self.block_n, self.num_warps, self.num_stages]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """The inverse of `numbers`."""
        block_m, block_n, num_warps, num_stages = numbers
        return cls(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)

    def blocks(self, shape: Attention) -> int:
        """How many blocks are launched."""
        return shape.batch * shape.heads * ceil_div(shape.queries, self.block_m)

    def steps(self, shape: Attention) -> int:
        """How many steps over the keys the longest block takes."""
        return ceil_div(shape.read_keys, self.block_n)


def attention_shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool) -> Attention:
    """The geometry of tensors with four axes; the mask's axes, at most four, broadcast to the scores."""
    batch, heads, queries, size = query.shape
    _, key_heads, keys, value_size = value.shape
    return Attention(
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        queries=queries,
        keys=keys,
        size=size,
        value_size=value_size,
        query_strides=_strides(query),
        key_strides=_strides(key),
        value_strides=_strides(value),
        mask_strides=None if mask is None else _strides(mask.expand(batch, heads, queries, keys)),
        causal=causal,
    )


def attention_candidates(shape: Attention, *, limit: int = 6, itemsize: int = 2) -> list[AttentionTiling]:
    """At most ``limit`` tilings, the most promising first, no two alike but for warps and stages more than twice.

    ``itemsize``: bytes of an element.
    """
    return most_promising(_all(shape, itemsize), partial(estimate, shape), limit=limit, alike=2)


def estimate(shape: Attention, tiling: AttentionTiling) -> float:
    """Microseconds, roughly: each step's latency and products, once more for each turn of the blocks."""
    turns = ceil_div(tiling.blocks(shape), MULTIPROCESSORS)
    steps = tiling.steps(shape)
    width = (_padded(shape.size) + _padded(shape.value_size)) * tiling.block_n
    flops = 2 * tiling.block_m * width * steps
    nbytes = 2 * width * steps
    latency = 0.5 + 0.25 * (steps - 1) / min(tiling.num_stages, 2)
    # Softmax and conversions go through registers, by the thread.
    elements = tiling.block_m * tiling.block_n * steps / (32 * tiling.num_warps)
    busy = flops / 3e6 + nbytes / 120e3
    return latency + ceil_div(turns, 2) * elements * 0.004 + turns * busy


def _all(shape: Attention, itemsize: int) -> Iterator[AttentionTiling]:
    longest = max(32, 1 << (shape.read_keys - 1).bit_length())
    for block_m in (16, 32, 64, 128):
        if block_m > 16 and block_m >= 2 * shape.queries:
            continue
        for block_n in (32, 64, 128, 256):
            if block_n > longest:
                continue
            for num_warps in (1, 2, 4, 8):
                scores = block_m * block_n // (32 * num_warps)  # that a thread holds
                if 8 <= scores <= 96 and num_warps * 4 <= block_m:
                    yield from _staged(shape, block_m, block_n, num_warps, itemsize)


def _staged(
    shape: Attention, block_m: int, block_n: int, num_warps: int, itemsize: int
) -> Iterator[AttentionTiling]:
    """One step fetches through registers, several through shared memory, some steps ahead."""
    width = _padded(shape.size) + _padded(shape.value_size)
    steps = ceil_div(shape.read_keys, block_n)
    for num_stages in (1,) if steps == 1 else (2, 3):
        registers = block_n * width * itemsize // (4 * 32 * num_warps)
        nbytes = itemsize * width * (num_stages * block_n + block_m)
        fits = registers <= _FETCHED_REGISTERS if steps == 1 else nbytes <= _SHARED_NBYTES
        if fits and num_stages <= steps:
            yield AttentionTiling(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def attention_settings(shape: Attention, tiling: AttentionTiling, *, scale: float, trigger: str) -> dict[str, Any]:
    """What is compiled into a kernel: the template's constants and Triton's options."""
    return {
        "HEADS": shape.heads,
        "GROUP": shape.heads // shape.key_heads,
        "QUERIES": shape.queries,
        "KEYS": shape.keys,
        "SIZE": shape.size,
        "VALUE_SIZE": shape.value_size,
        **_named("QUERY", shape.query_strides),
        **_named("KEY", shape.key_strides),
        **_named("VALUE", shape.value_strides),
        **_named("MASK", shape.mask_strides or (0, 0, 0, 0)),
        "CAUSAL": shape.causal,
        "SCALE": scale,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_D": _padded(shape.size),
        "BLOCK_V": _padded(shape.value_size),
        "STAGES": tiling.num_stages,
        "TRIGGER": trigger,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        "launch_pdl": trigger != "none",
    }


def attention_job(settings: dict[str, Any], *, dtype: str, mask: str | None) -> Job:
    """The job of a launch by `launch_attention`; ``dtype`` as in "float16", ``mask`` the mask's."""
    return Job(kernel="attention", pointers=(dtype, dtype, dtype, mask, dtype), settings=settings)


def launch_attention(
    shape: Attention,
    tiling: AttentionTiling,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    scale: float,
    trigger: str,
) -> None:
    """Write the attention to ``out`` (batch, queries, heads, value size), contiguous."""
    from nimblec.kernels.attention_template import attention as template

    constants = attention_settings(shape, tiling, scale=scale, trigger=trigger)
    template[tiling.blocks(shape),](query, key, value, mask, out, **constants)


def _named(name: str, strides: Strides) -> dict[str, int]:
    return dict(zip((f"{name}_{axis}" for axis in ("BATCH", "HEAD", "ROW", "COLUMN")), strides, strict=True))


def _padded(size: int) -> int:
    """The width of a tile that holds a head."""
    return max(16, 1 << (size - 1).bit_length())


def _strides(x: Tensor) -> Strides:
    """Strides, zero along axes of length 1, where they say nothing."""
    a, b, c, d = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return a, b, c, d


def _span(sizes: Sequence[int], strides: Strides) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _new(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty((batch, queries, heads, value.shape[-1]))


def _fake(query: Tensor, _key: Tensor, value: Tensor, *_how: object) -> Tensor:
    return _new(query, value)


def _cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    tiling: Sequence[int],
    trigger: str,
) -> Tensor:
    out = _new(query, value)
    launch_attention(
        attention_shape(query, key, value, mask, causal=causal),
        AttentionTiling.of(tiling),
        query=query,
        key=key,
        value=value,
        mask=mask,
        out=out,
        scale=scale,
        trigger=trigger,
    )
    return out


def _cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    tiling: Sequence[int],  # noqa: ARG001
    trigger: str,  # noqa: ARG001
) -> Tensor:
    return attended(query, key, value, mask, causal=causal, scale=scale).transpose(1, 2).to(query.dtype).contiguous()


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    """What the kernel computes, in float32: (batch, heads, queries, value size)."""
    added = mask if mask is None or mask.dtype == torch.bool else mask.float()
    return functional.scaled_dot_product_attention(
        query.float(),
        key.float(),
        value.float(),
        added,
        is_causal=causal,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


torch.library.register_fake("nimblec::attention", _fake, lib=_LIBRARY)
_LIBRARY.impl("attention", _cuda, "CUDA")
_LIBRARY.impl("attention", _cpu, "CPU")

attention: OpOverload = torch.ops.nimblec.attention.default
