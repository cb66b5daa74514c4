"""Choose our own kernels by timing them beside the framework's calls, as cold as in a network."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from nimblec.kernels.candidates import candidates
from nimblec.kernels.choosing import Choice, Timer, choose
from nimblec.kernels.compiling import Job, compile_all, convolution_job, depthwise_job
from nimblec.kernels.depthwise import (
    DepthwiseTiling,
    depthwise,
    depthwise_candidates,
    depthwise_settings,
    pack_depthwise,
)
from nimblec.kernels.launching import settings
from nimblec.kernels.ops import convolution, linear
from nimblec.kernels.packing import counters, pack_convolution, pack_linear
from nimblec.kernels.shapes import Tiling
from nimblec.kernels.timing import GraphTimer, WeightPool
from nimblec.optimize.own_kernels import Choose, Request, requests, use_own_kernels
from nimblec.optimize.rewriter import fake

AnyTiling = Tiling | DepthwiseTiling

THEIRS = "framework"
_POOL_NBYTES = 512 << 20  # several times the L2 cache
_HOPPER = (9, 0)


class Pool(Protocol):
    """Where copies of weights come from: `nimblec.kernels.timing.WeightPool`."""

    def take(self, shape: Sequence[int]) -> Tensor:
        """Another copy."""


def select_own_kernels(module: fx.GraphModule) -> Mapping[str, Choice]:
    """Put our own kernels in wherever they are faster on this GPU; what was chosen, by request."""
    chosen: dict[str, Choice] = {}
    if torch.cuda.get_device_capability() < _HOPPER:
        return chosen
    timer = GraphTimer()
    for dtype in dict.fromkeys(request.dtype for request in requests(module)):
        selector = Selector(timer, WeightPool(nbytes=_POOL_NBYTES, dtype=dtype), length=timer.length)
        selector.prepare(request for request in requests(module) if request.dtype is dtype)
        use_own_kernels(module, partial(_of_dtype, dtype, selector))
        chosen |= selector.choices
    return chosen


def _of_dtype(dtype: torch.dtype, selector: Choose, request: Request) -> AnyTiling | None:
    return selector(request) if request.dtype is dtype else None


class Selector:
    """A `choose` for `use_own_kernels`: equal requests are timed once; ``choices`` tells what came out."""

    def __init__(
        self, timer: Timer, pool: Pool, *, length: int, compile_jobs: Callable[..., None] = compile_all
    ) -> None:
        """``timer`` times calls that take the number of a copy of their weights, up to ``length``."""
        self._timer = timer
        self._pool = pool
        self._length = length
        self._compile = compile_jobs
        self.choices: dict[str, Choice] = {}

    def prepare(self, requests: Iterable[Request]) -> None:
        """Compile all candidates of all requests side by side."""
        distinct = {signature(request): request for request in requests}
        self._compile([_job(request, tiling) for request in distinct.values() for tiling in tilings(request)])

    def __call__(self, request: Request) -> AnyTiling | None:
        """The fastest tiling; None where the framework's calls are as fast."""
        key = signature(request)
        named = {"x".join(map(str, tiling.numbers)): tiling for tiling in tilings(request)}
        if key not in self.choices:
            sides: dict[str, Callable[[int], object]] = {THEIRS: self._theirs(request)}
            sides |= {name: self._ours(request, tiling) for name, tiling in named.items()}
            self.choices[key] = choose(sides, self._timer)
        return named.get(self.choices[key].best)

    def _theirs(self, request: Request) -> Callable[[int], object]:
        weight = request.constants[request.weight]
        taken = [self._pool.take((weight.numel(),)) for _ in range(self._length)]
        copies = [flat.as_strided(weight.shape, weight.stride()) for flat in taken]
        values = {node: _example(request, node) for each in request.nodes for node in each.all_input_nodes}
        return lambda n: _evaluate(request.nodes, values | {request.weight: copies[n]})

    def _ours(self, request: Request, tiling: AnyTiling) -> Callable[[int], object]:
        shape = request.shape
        packed = packed_like(request, tiling)
        copies = [self._pool.take(packed) for _ in range(self._length)]
        x, residual = _example(request, request.x), None
        bias = None if request.bias is None else _example(request, request.bias)
        if request.residual is not None:
            residual = _example(request, request.residual)
            residual = residual.reshape(shape.rows, -1) if request.kind == "linear" else residual
        geometry = (shape.kernel, shape.stride, shape.padding, shape.dilation)
        end = (request.activation, tiling.numbers, True)
        if isinstance(tiling, DepthwiseTiling):
            return lambda n: depthwise(x, copies[n], bias, residual, *geometry, *end)
        down, across = tiling.tiles(shape)
        split = tiling.split_k > 1
        arrived = [counters(down * across, x.device) if split else None for _ in range(self._length)]
        if request.kind == "linear":
            return lambda n: linear(x, copies[n], bias, residual, arrived[n], shape.out_channels, *end)
        return lambda n: convolution(x, copies[n], bias, residual, arrived[n], shape.out_channels, *geometry, *end)


def tilings(request: Request) -> list[Any]:
    """The candidates of a request."""
    if request.kind == "depthwise":
        return depthwise_candidates(request.shape)
    return candidates(request.shape)


def signature(request: Request) -> str:
    """What tells requests apart."""
    calls = " ".join(str(node.target) for node in request.nodes)
    parts = (request.dtype, request.bias is not None, request.residual is not None, request.activation)
    return f"{request.kind} {request.shape} {parts} {calls}"


def packed_like(request: Request, tiling: AnyTiling) -> tuple[int, ...]:
    """The shape of the weights, packed."""
    weight = request.constants[request.weight].to("meta")
    if isinstance(tiling, DepthwiseTiling):
        return tuple(pack_depthwise(weight, tiling).shape)
    pack = pack_linear if request.kind == "linear" else pack_convolution
    return tuple(pack(weight, tiling).shape)


def _job(request: Request, tiling: AnyTiling) -> Job:
    shape = request.shape
    shape = replace(shape, pixel_stride=shape.pixel_stride or shape.channels)
    dtype = str(request.dtype).removeprefix("torch.")
    has = {"bias": request.bias is not None, "residual": request.residual is not None}
    how = {"activation": request.activation, "programmatic": True}
    if isinstance(tiling, DepthwiseTiling):
        return depthwise_job(depthwise_settings(shape, tiling, **how), dtype=dtype, **has)  # type: ignore[arg-type]
    return convolution_job(settings(shape, tiling, **how), dtype=dtype, **has)  # type: ignore[arg-type]


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
