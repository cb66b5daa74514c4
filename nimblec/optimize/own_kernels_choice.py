"""Choose our own kernels by timing them beside the framework's calls, as cold as in a network."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import fake
from nimblec.kernels.candidates import candidates
from nimblec.kernels.choosing import Choice, Timer
from nimblec.kernels.compiling import Job, convolution_job, depthwise_job
from nimblec.kernels.depthwise import (
    DepthwiseTiling,
    depthwise,
    depthwise_candidates,
    depthwise_settings,
    pack_depthwise,
)
from nimblec.kernels.launching import Trigger, settings
from nimblec.kernels.ops import convolution, convolution_into, linear
from nimblec.kernels.packing import counters, pack_convolution, pack_linear
from nimblec.kernels.shapes import Tiling
from nimblec.kernels.timing import GraphTimer, WeightPool
from nimblec.optimize.own_kernels import Choose, Request, requests, use_own_kernels
from nimblec.optimize.own_selection import HOPPER, Call, TilingSelector, Times, dtype_name, machine

AnyTiling = Tiling | DepthwiseTiling

_POOL_NBYTES = 512 << 20  # several times the L2 cache


class Pool(Protocol):
    """Where copies of weights come from: `nimblec.kernels.timing.WeightPool`."""

    def take(self, shape: Sequence[int]) -> Tensor:
        """Another copy."""


def select_own_kernels(
    module: fx.GraphModule, cache: Times | None = None, *, trigger: Trigger = "late"
) -> Mapping[str, Choice]:
    """Put our own kernels in wherever they are faster on this GPU; what was chosen, by request.

    Times that the ``cache`` has are not measured again.
    """
    chosen: dict[str, Choice] = {}
    if torch.cuda.get_device_capability() < HOPPER:
        return chosen
    timer = GraphTimer()
    screen = timer.screen()
    known = {"times": cache, "machine": machine("convolution") + machine("depthwise")}
    found = list(requests(module))
    for dtype in dict.fromkeys(request.dtype for request in found):
        pool = WeightPool(nbytes=_POOL_NBYTES, dtype=dtype)
        selector = Selector(timer, pool, length=timer.length, screen=screen, trigger=trigger, **known)
        selector.prepare(request for request in found if request.dtype is dtype)
        use_own_kernels(module, partial(_of_dtype, dtype, selector), trigger=trigger)
        chosen |= selector.choices
    return chosen


def _of_dtype(dtype: torch.dtype, selector: Choose, request: Request) -> AnyTiling | None:
    return selector(request) if request.dtype is dtype else None


class Selector(TilingSelector[Request, AnyTiling]):
    """A `choose` for `use_own_kernels`."""

    def __init__(self, timer: Timer, pool: Pool, *, length: int, **how: Any) -> None:
        """``timer`` times calls that take the number of a copy of their weights, up to ``length``."""
        super().__init__(timer, **how)
        self._pool = pool
        self._length = length

    def tilings(self, request: Request) -> Sequence[AnyTiling]:
        """The candidates."""
        return tilings(request)

    def job(self, request: Request, tiling: AnyTiling) -> Job:
        """As our call launches it."""
        return _job(request, tiling, self.trigger)

    def theirs(self, request: Request) -> Call:
        """The framework's calls."""
        weight = request.constants[request.weight]
        taken = [self._pool.take((weight.numel(),)) for _ in range(self._length)]
        copies = [flat.as_strided(weight.shape, weight.stride()) for flat in taken]
        before = request.before
        values = {node: _example(request, node) for node in _read(request)}
        if before is None:
            return lambda n: _evaluate(request.nodes, values | {request.weight: copies[n]})
        rest = request.nodes[len(before.nodes) :]
        read = _evaluate(before.nodes, values)

        def call(n: int) -> object:
            """Requests that share what they read share its cost: one of ``sharers`` calls pays."""
            own = n % before.sharers == 0
            values[before.nodes[-1]] = read
            return _evaluate(request.nodes if own else rest, values | {request.weight: copies[n]})

        return call

    def ours(self, request: Request, tiling: AnyTiling) -> Call:
        """Our call."""
        shape = request.shape
        packed = packed_like(request, tiling)
        copies = [self._pool.take(packed) for _ in range(self._length)]
        x, residual = _example(request, request.x), None
        bias = None if request.bias is None else _example(request, request.bias)
        if request.residual is not None:
            residual = _example(request, request.residual)
            residual = residual.reshape(shape.rows, -1) if request.kind == "linear" else residual
        geometry = (shape.kernel, shape.stride, shape.padding, shape.dilation)
        end = (request.activation, tiling.numbers, self.trigger)
        before = _prologue(request)
        if isinstance(tiling, DepthwiseTiling):
            return lambda n: depthwise(x, copies[n], bias, residual, shape.out_channels, *geometry, *end, **before)
        down, across = tiling.tiles(shape)
        arrived: Sequence[Tensor | None] = [None] * self._length
        if tiling.split_k > 1:
            arrived = counters(self._length * down * across, x.device).view(self._length, -1).unbind()
        how = {"arithmetic": request.arithmetic, **before}
        if request.kind == "linear":
            return lambda n: linear(x, copies[n], bias, residual, arrived[n], shape.out_channels, *end, **how)
        op = convolution
        if request.into is not None:
            op, how["out"] = convolution_into, _example(request, request.into)
        shared = bias, residual
        return lambda n: op(x, copies[n], *shared, arrived[n], shape.out_channels, *geometry, *end, **how)


def tilings(request: Request) -> list[Any]:
    """The candidates of a request."""
    if request.kind == "depthwise":
        return depthwise_candidates(request.shape)
    return candidates(request.shape, itemsize=request.dtype.itemsize)


def packed_like(request: Request, tiling: AnyTiling) -> tuple[int, ...]:
    """The shape of the weights, packed."""
    weight = request.constants[request.weight].to("meta")
    if isinstance(tiling, DepthwiseTiling):
        return tuple(pack_depthwise(weight, tiling).shape)
    pack = pack_linear if request.kind == "linear" else pack_convolution
    return tuple(pack(weight, tiling).shape)


def _job(request: Request, tiling: AnyTiling, trigger: Trigger) -> Job:
    shape = request.shape
    before = request.before.activation if request.before else "none"
    dtype, has = dtype_name(request.dtype), request.has
    how: dict[str, Any] = {"activation": request.activation, "before": before, "trigger": trigger}
    if isinstance(tiling, DepthwiseTiling):
        return depthwise_job(depthwise_settings(shape, tiling, **how), dtype=dtype, has=has)
    return convolution_job(settings(shape, tiling, arithmetic=request.arithmetic, **how), dtype=dtype, has=has)


def _prologue(request: Request) -> dict[str, Any]:
    """As the ops take it."""
    before = request.before
    if before is None:
        return {}
    given: dict[str, Any] = {"before": before.activation}
    if before.gate is not None:
        given["gate"] = _example(request, before.gate)
    for name, value in (("scale", before.scale), ("shift", before.shift)):
        if value is not None:
            given[name] = value.float().contiguous()
    return given


def _read(request: Request) -> Iterator[fx.Node]:
    """What the calls of a request read that is none of them."""
    for node in request.nodes:
        yield from (source for source in node.all_input_nodes if source not in request.nodes)


def _example(request: Request, node: fx.Node) -> Tensor:
    """A constant as it is; anything else as random numbers of its kind."""
    if node in request.constants:
        return request.constants[node]
    like = fake(node)
    device = request.constants[request.weight].device
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return empty.normal_() if like.dtype.is_floating_point else empty.zero_()


def _evaluate(nodes: Sequence[fx.Node], values: Mapping[fx.Node, Tensor]) -> Tensor:
    """The value of the last of ``nodes``, called one after the other."""
    known = dict(values)
    for node in nodes:
        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), known.__getitem__)
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[nodes[-1]]
