"""A description of a call of a kernel's op, which can be put into a graph, timed, or compiled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from nimblec.graph.rewriter import Rewriter, fake
from nimblec.graph.state import set_scratch
from nimblec.graph.views import as_stored
from nimblec.kernels.compiling import Job
from nimblec.kernels.launch import launch_of


class Pool(Protocol):
    """A source of copies of weights: `nimblec.kernels.timing.WeightPool`."""

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor of the dtype, shape and strides of ``like``, in memory of its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Made:
    """A constant that is made for one call: ``make(source)``.

    Each timed call has its own copy of ``weights``, as cold in the cache as a network's, and of ``counters``, which
    concurrent calls cannot share; ``factors`` are shared.
    """

    source: Tensor
    make: Callable[[Tensor], Tensor]
    role: Literal["weights", "counters", "factors"]

    @property
    def value(self) -> Tensor:
        """The constant itself."""
        return self.make(self.source)

    @property
    def meta(self) -> Tensor:
        """A meta tensor of its dtype, shape and strides."""
        return self.make(self.source.to("meta"))


def zero_counters(count: int, device: torch.device) -> Made:
    """Return counters for one call, which are zero before and after each launch."""
    like = torch.empty(0, dtype=torch.int32, device=device)
    return Made(source=like, make=lambda like: like.new_zeros(count), role="counters")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AsStored:
    """The elements of a dense node in their order in memory, as a tensor of ``shape``."""

    node: fx.Node
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AsBytes:
    """A node of float16 that a timed call reads as bytes of e4m3, which `fp8_results.write_fp8` lets the plan store."""

    node: fx.Node


Leaf = fx.Node | Made | AsStored | AsBytes
"""A placeholder for a tensor among the arguments of a `Call`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A call of ``op``, with a `Leaf` for each tensor among its arguments."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, value: Callable[[Leaf], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments, with ``value(leaf)`` for each leaf."""
        args, kwargs = pytree.tree_map_only((fx.Node, Made, AsStored, AsBytes), value, (self.args, dict(self.kwargs)))
        return args, kwargs

    def job(self) -> Job:
        """Return the job that compiles its launch."""
        args, kwargs = self.arguments(as_meta)
        return launch_of(self.op, *args, **kwargs).job

    def put(self, rewriter: Rewriter, *, at: fx.Node) -> fx.Node:
        """Return the call in a graph, before ``at``, with the constants that it needs."""

        def value(leaf: Leaf) -> fx.Node:
            if isinstance(leaf, Made):
                constant = rewriter.constant(leaf.value, at=at)
                if leaf.role == "counters":
                    set_scratch(constant)
                return constant
            if isinstance(leaf, AsStored):
                return as_stored(rewriter, leaf.node, list(leaf.shape), at=at)
            return leaf.node if isinstance(leaf, AsBytes) else leaf

        args, kwargs = self.arguments(value)
        return rewriter.call(self.op, *args, at=at, **kwargs)

    def timed(self, pool: Pool, length: int) -> Callable[[int], object]:
        """Return a function of n < ``length`` that calls the op on random numbers, with the n-th copy of weights."""
        known: dict[Leaf, Tensor] = {}
        shape_of = cache(as_meta)

        def value(leaf: Leaf) -> Tensor:
            if isinstance(leaf, Made) and leaf.role == "weights":
                return pool.take(shape_of(leaf))
            if isinstance(leaf, Made) and leaf.role == "counters":
                return leaf.value
            if leaf not in known:
                known[leaf] = leaf.value if isinstance(leaf, Made) else example(as_meta(leaf), _device(leaf))
            return known[leaf]

        chain = [self.arguments(value) for _ in range(length)]

        def call(n: int) -> object:
            args, kwargs = chain[n]
            return self.op(*args, **kwargs)

        return call


def example(like: Tensor, device: torch.device) -> Tensor:
    """Draw random numbers with the dtype, shape and strides of ``like``; bools and integers are ones."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    flat = torch.ones(span, dtype=like.dtype, device=device)
    if like.dtype.is_floating_point:
        flat.normal_()
    return flat.as_strided(like.shape, like.stride())


def evaluate(nodes: Sequence[fx.Node], values: Mapping[fx.Node, Tensor]) -> Tensor:
    """Return the value of the last of ``nodes``, which are called in order."""
    known = dict(values)
    for node in nodes:
        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), known.__getitem__)
        target: Callable[..., Tensor] = node.target  # type: ignore[assignment]
        known[node] = target(*args, **kwargs)
    return known[nodes[-1]]


def as_meta(leaf: Leaf) -> Tensor:
    """Return a meta tensor of its dtype, shape and strides."""
    if isinstance(leaf, Made):
        return leaf.meta
    like = fake(leaf if isinstance(leaf, fx.Node) else leaf.node)
    if isinstance(leaf, AsStored):
        return torch.empty(leaf.shape, dtype=like.dtype, device="meta")
    dtype = torch.uint8 if isinstance(leaf, AsBytes) else like.dtype
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")


def _device(leaf: fx.Node | AsStored | AsBytes) -> torch.device:
    return fake(leaf if isinstance(leaf, fx.Node) else leaf.node).device
