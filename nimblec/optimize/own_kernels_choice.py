"""Choose our own kernels by timing them beside the framework's calls, as cold as in a network."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from nimblec.kernels.candidates import candidates
from nimblec.kernels.choosing import Choice, Timer, choose, rank
from nimblec.kernels.compiling import Job, compile_all, convolution_job, depthwise_job
from nimblec.kernels.depthwise import (
    DepthwiseTiling,
    depthwise,
    depthwise_candidates,
    depthwise_settings,
    pack_depthwise,
)
from nimblec.kernels.launching import Trigger, settings
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
_SCREEN_LENGTH = 12
_SCREEN_REPEATS = 3
_TEMPLATES = ("convolution", "depthwise")


class Pool(Protocol):
    """Where copies of weights come from: `nimblec.kernels.timing.WeightPool`."""

    def take(self, shape: Sequence[int]) -> Tensor:
        """Another copy."""


class Times(Protocol):
    """Measured nanoseconds by key, as `nimblec.timing_cache.TimingCache` keeps them between compilations."""

    def __contains__(self, key: str) -> bool:
        """Whether a time is known."""

    def __getitem__(self, key: str) -> int:
        """The time."""

    def __setitem__(self, key: str, duration_ns: int) -> None:
        """Note a time."""


def select_own_kernels(
    module: fx.GraphModule, cache: Times | None = None, *, trigger: Trigger = "late"
) -> Mapping[str, Choice]:
    """Put our own kernels in wherever they are faster on this GPU; what was chosen, by request.

    Times that the ``cache`` has are not measured again.
    """
    chosen: dict[str, Choice] = {}
    if torch.cuda.get_device_capability() < _HOPPER:
        return chosen
    timer = GraphTimer()
    screen = timer.shorter(length=_SCREEN_LENGTH, repeats=_SCREEN_REPEATS)
    times = {} if cache is None else cache
    for dtype in dict.fromkeys(request.dtype for request in requests(module)):
        pool = WeightPool(nbytes=_POOL_NBYTES, dtype=dtype)
        selector = Selector(
            timer, pool, length=timer.length, screen=screen, times=times, machine=_machine(), trigger=trigger
        )
        selector.prepare(request for request in requests(module) if request.dtype is dtype)
        use_own_kernels(module, partial(_of_dtype, dtype, selector), trigger=trigger)
        chosen |= selector.choices
    return chosen


def _of_dtype(dtype: torch.dtype, selector: Choose, request: Request) -> AnyTiling | None:
    return selector(request) if request.dtype is dtype else None


def _machine() -> str:
    """What times hang on beside the request: the device, the libraries, the kernels' code."""
    folder = files("nimblec.kernels")
    code = b"".join(folder.joinpath(f"{kernel}_template.py").read_bytes() for kernel in _TEMPLATES)
    from triton import __version__ as triton_version

    versions = torch.__version__, triton_version, torch.backends.cudnn.version()
    return repr((torch.cuda.get_device_name(), *versions, sha256(code).hexdigest()))


class Selector:
    """A `choose` for `use_own_kernels`: equal requests are timed once; ``choices`` tells what came out."""

    def __init__(
        self,
        timer: Timer,
        pool: Pool,
        *,
        length: int,
        screen: Timer | None = None,
        times: Times | None = None,
        machine: str = "",
        trigger: Trigger = "late",
        compile_jobs: Callable[[Sequence[Job]], None] = compile_all,
    ) -> None:
        """``timer`` times calls that take the number of a copy of their weights, up to ``length``.

        ``screen`` is a quicker timer to sort the candidates out with, ``times`` what is known of ``machine``.
        """
        self._timer = timer
        self._pool = pool
        self._length = length
        self._screen = screen
        self._times: Times = {} if times is None else times
        self._machine = machine
        self._trigger = trigger
        self._compile = compile_jobs
        self.choices: dict[str, Choice] = {}

    def prepare(self, requests: Iterable[Request]) -> None:
        """Compile all that will be launched side by side: what is chosen already, or else all candidates."""
        jobs = []
        for key, request in {signature(request): request for request in requests}.items():
            named = _named(request)
            known = self._known(key, named)
            names = list(named) if known is None else [name for name in named if name == known.best]
            jobs += [_job(request, named[name], self._trigger) for name in names]
        if jobs:
            self._compile(jobs)

    def __call__(self, request: Request) -> AnyTiling | None:
        """The fastest tiling; None where the framework's calls are as fast."""
        key, named = signature(request), _named(request)
        if key not in self.choices:
            self.choices[key] = self._known(key, named) or self._measured(key, request, named)
        return named.get(self.choices[key].best)

    def _known(self, key: str, named: Iterable[str]) -> Choice | None:
        """The choice by the times that are remembered: those of the calls that were timed well."""
        sides = {side: self._side(key, side) for side in (THEIRS, *named)}
        times = {side: self._times[at] / 1000 for side, at in sides.items() if at in self._times}
        return rank(times) if THEIRS in times and len(times) > 1 else None

    def _measured(self, key: str, request: Request, named: Mapping[str, AnyTiling]) -> Choice:
        sides: dict[str, Callable[[int], object]] = {THEIRS: self._theirs(request)}
        sides |= {name: self._ours(request, tiling) for name, tiling in named.items()}
        choice = choose(sides, self._timer, screen=self._screen)
        for side, microseconds in choice.microseconds.items():
            self._times[self._side(key, side)] = round(1000 * microseconds)
        return choice

    def _side(self, key: str, side: str) -> str:
        return sha256(repr((self._machine, self._trigger, key, side)).encode()).hexdigest()

    def _theirs(self, request: Request) -> Callable[[int], object]:
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
        end = (request.activation, tiling.numbers, self._trigger)
        before = _prologue(request)
        if isinstance(tiling, DepthwiseTiling):
            return lambda n: depthwise(x, copies[n], bias, residual, *geometry, *end, **before)
        down, across = tiling.tiles(shape)
        arrived: Sequence[Tensor | None] = [None] * self._length
        if tiling.split_k > 1:
            arrived = counters(self._length * down * across, x.device).view(self._length, -1).unbind()
        if request.kind == "linear":
            return lambda n: linear(x, copies[n], bias, residual, arrived[n], shape.out_channels, *end)
        shared = bias, residual
        return lambda n: convolution(x, copies[n], *shared, arrived[n], shape.out_channels, *geometry, *end, **before)


def _named(request: Request) -> dict[str, AnyTiling]:
    return {"x".join(map(str, tiling.numbers)): tiling for tiling in tilings(request)}


def tilings(request: Request) -> list[Any]:
    """The candidates of a request."""
    if request.kind == "depthwise":
        return depthwise_candidates(request.shape)
    return candidates(request.shape)


def signature(request: Request) -> str:
    """What tells requests apart."""
    calls = " ".join(str(node.target) for node in request.nodes)
    before = request.before and (request.before.activation, request.before.sharers)
    parts = request.dtype, sorted(_has(request)), before, request.activation
    return f"{request.kind} {request.shape} {parts} {calls}"


def packed_like(request: Request, tiling: AnyTiling) -> tuple[int, ...]:
    """The shape of the weights, packed."""
    weight = request.constants[request.weight].to("meta")
    if isinstance(tiling, DepthwiseTiling):
        return tuple(pack_depthwise(weight, tiling).shape)
    pack = pack_linear if request.kind == "linear" else pack_convolution
    return tuple(pack(weight, tiling).shape)


def _job(request: Request, tiling: AnyTiling, trigger: Trigger) -> Job:
    shape = request.shape
    shape = replace(shape, pixel_stride=shape.pixel_stride or shape.channels)
    before = request.before.activation if request.before else "none"
    dtype, has = str(request.dtype).removeprefix("torch."), _has(request)
    how: dict[str, Any] = {"activation": request.activation, "before": before, "trigger": trigger}
    if isinstance(tiling, DepthwiseTiling):
        return depthwise_job(depthwise_settings(shape, tiling, **how), dtype=dtype, has=has)
    return convolution_job(settings(shape, tiling, **how), dtype=dtype, has=has)


def _has(request: Request) -> set[str]:
    """The names of the optional tensors that there are."""
    before = request.before
    named: dict[str, object] = {"bias": request.bias, "residual": request.residual}
    if before is not None:
        named |= {"scale": before.scale, "shift": before.shift, "gate": before.gate}
    return {name for name, value in named.items() if value is not None}


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
