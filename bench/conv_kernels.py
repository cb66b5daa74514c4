"""Triton kernels against cuDNN's and cuBLAS's, for the convolutions and products of some networks, batch 1.

``python -m bench.conv_kernels --model resnet50`` on a Hopper GPU compiles all candidates in parallel, times those of
each shape in a chain of calls whose weights are not in the L2 cache, checks every candidate against torch in float64,
and at the end times all calls of the network in one graph.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from bench.conv_networks import MODELS, Call
from bench.environment import describe
from nimblec.kernels.choosing import Choice, choose
from nimblec.kernels.compiling import Job, compile_all
from nimblec.kernels.gpu import GPU, TRIGGERS
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products import gemm_op as ops
from nimblec.kernels.products.depthwise_op import depthwise, pack_depthwise
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling, depthwise_candidates
from nimblec.kernels.products.gemm_op import Arithmetic
from nimblec.kernels.products.gemm_rewrite import AnyTiling
from nimblec.kernels.products.gemm_tilings import candidates
from nimblec.kernels.products.packing import counters, pack_rows
from nimblec.kernels.reference import ACTIVATIONS, Prologue, finish
from nimblec.kernels.shapes import Convolution, ceil_div
from nimblec.kernels.timing import GraphTimer, WeightPool
from nimblec.pytorch.model import set_arithmetic

aten = torch.ops.aten

THEIRS = "theirs"
TOLERANCE = 0.02
"""Of the results' standard deviation: float16 and bfloat16 round once, and sums differ in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The dtype of factors, and how float32 is multiplied."""

    dtype: torch.dtype
    arithmetic: Arithmetic = "tf32"


class Tensors:
    """The tensors that all versions of one call read, except the weights."""

    def __init__(self, call: Call, numbers: Numbers) -> None:
        self.call, shape, dtype = call, call.shape, numbers.dtype
        self._arithmetic = numbers.arithmetic
        size = (shape.batch, shape.height, shape.width, shape.channels)
        x = torch.randn(size, dtype=dtype, device="cuda")
        out = torch.randn((shape.rows, shape.out_channels), dtype=dtype, device="cuda")
        images = out.view(shape.batch, shape.out_height, shape.out_width, -1).permute(0, 3, 1, 2)
        self.x = x.view(shape.rows, shape.channels) if call.kind == "linear" else x.permute(0, 3, 1, 2)
        self.residual = (out if call.kind == "linear" else images) if call.residual else None
        self.bias = torch.randn(shape.out_channels, dtype=dtype, device="cuda")
        self.prologue = self._prologue(dtype)

    def _prologue(self, dtype: torch.dtype) -> Prologue:
        shape, reading = self.call.shape, self.call.reading
        scale = torch.rand(shape.channels, device="cuda") if reading == "norm relu" else None
        gate = None
        if reading == "gate":
            gate = torch.rand((shape.batch, shape.channels, 1, 1), dtype=dtype, device="cuda")
        activation = "relu" if "relu" in reading else "none"
        return Prologue(scale=scale, shift=scale, gate=gate, activation=activation)

    def prepared(self) -> Tensor:
        """The input of the library's call, prepared by the library's calls."""
        prologue, x = self.prologue, self.x
        if prologue.scale is not None:
            ones = prologue.scale
            x = functional.batch_norm(x, 1 - ones, ones, ones, ones)
        x = ACTIVATIONS[prologue.activation](x)
        return x if prologue.gate is None else x * prologue.gate

    def ours(self, weight: Tensor, tiling: AnyTiling, arrived: Tensor | None, trigger: str = "late") -> Tensor:
        """Our op."""
        op, args, how = self._call(weight, tiling, arrived, trigger)
        return op(*args, **how)

    def job(self, tiling: AnyTiling, trigger: str = "late") -> Job:
        """The kernel that our op launches."""
        weight = torch.empty(packed(self.call, tiling), dtype=self.x.dtype, device="meta")
        op, args, how = self._call(weight, tiling, _counters(self.call.shape, tiling), trigger)
        return launch_of(op, *args, **how).job

    def _call(
        self, weight: Tensor, tiling: AnyTiling, arrived: Tensor | None, trigger: str
    ) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
        call, shape = self.call, self.call.shape
        shared = self.x, weight, self.bias, self.residual, arrived, shape.out_channels
        last = call.activation, tiling.numbers, trigger
        if call.kind == "linear":
            return ops.linear, (*shared, *last), {"arithmetic": self._arithmetic}
        geometry = shape.kernel, shape.stride, shape.padding, shape.dilation
        if call.kind == "depthwise":
            return depthwise, (*shared[:4], shape.out_channels, *geometry, *last), self._before()
        return ops.convolution, (*shared, *geometry, *last), {"arithmetic": self._arithmetic, **self._before()}

    def _before(self) -> dict[str, Any]:
        prologue = self.prologue
        named = {"scale": prologue.scale, "shift": prologue.shift, "gate": prologue.gate}
        return {**named, "before": prologue.activation}

    def theirs(self, rows: Tensor, x: Tensor | None = None) -> Tensor:
        """The library's call for weights (out channels, depth), with separate calls for what it cannot fuse.

        ``x``: its input, if another call has prepared it.
        """
        if self.call.kind == "linear":
            return self._linear(rows)
        shape = self.call.shape
        weight = self.images(rows)
        geometry = shape.stride, shape.padding, shape.dilation
        x = x if x is not None else self.prepared()
        if self.call.activation == "relu" and self.residual is not None:
            return aten.cudnn_convolution_add_relu(x, weight, self.residual, 1.0, self.bias, *geometry, 1)
        if self.call.activation == "relu":
            return aten.cudnn_convolution_relu(x, weight, self.bias, *geometry, 1)
        total = aten.convolution(x, weight, None, *geometry, False, [0, 0], self.groups)
        if self.residual is not None or self.call.activation == "none":
            return total.add_(self.bias[:, None, None] if self.residual is None else self.residual)
        return ACTIVATIONS[self.call.activation](total)

    @property
    def groups(self) -> int:
        """The groups of the convolution, as torch counts them."""
        return self.call.shape.channels if self.call.kind == "depthwise" else 1

    def images(self, rows: Tensor) -> Tensor:
        """Weights (out channels, depth) as torch's convolutions take them, channels last."""
        shape = self.call.shape
        return rows.view(shape.out_channels, *shape.kernel, -1).permute(0, 3, 1, 2)

    def _linear(self, rows: Tensor) -> Tensor:
        if self.call.activation == "gelu_tanh":
            return aten._addmm_activation.default(self.bias, self.x, rows.t(), use_gelu=True)  # noqa: SLF001 - ATen
        total = aten.addmm(self.bias, self.x, rows.t())
        return ACTIVATIONS[self.call.activation](total)

    def expected(self, rows: Tensor) -> Tensor:
        """In float64."""
        shape, bias = self.call.shape, self.bias.double()
        if self.call.kind == "linear":
            total = functional.linear(self.x.double(), rows.double(), bias)
        else:
            weight, geometry = self.images(rows).double(), (shape.stride, shape.padding, shape.dilation)
            total = functional.conv2d(self.prologue(self.x.double()), weight, bias, *geometry, self.groups)
        return finish(total, self.residual, self.call.activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The times of one distinct call, and its number in the network."""

    call: Call
    count: int
    choice: Choice
    tilings: dict[str, AnyTiling]
    error: float

    @property
    def theirs(self) -> float:
        """Microseconds of the library's call."""
        return self.choice.microseconds[THEIRS]

    @property
    def ours(self) -> str:
        """The fastest of our candidates."""
        return min(self.tilings, key=self.choice.microseconds.__getitem__)


def main() -> None:
    """Measure the networks named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["resnet50"])
    parser.add_argument("--limit", type=int, default=16, help="candidates a shape")
    parser.add_argument("--out", type=Path, help="folder for the raw figures")
    parser.add_argument("--float32", choices=get_args(Arithmetic), help="measure float32 with this arithmetic")
    given = parser.parse_args()
    set_arithmetic("tf32" if given.float32 == "tf32" else "fp32")
    print(describe())
    for name in given.model:
        begin = time.perf_counter()
        build, dtype = MODELS[name]
        how = Numbers(dtype=torch.float32, arithmetic=given.float32) if given.float32 else Numbers(dtype=dtype)
        rows = measure(name, list(build()), how, given.limit)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / f"conv_kernels_{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - begin:.0f} s in all\n")


def tilings(call: Call, numbers: Numbers, limit: int) -> Sequence[AnyTiling]:
    """The candidates for a call."""
    if call.kind == "depthwise":
        return depthwise_candidates(call.shape, GPU.current(), limit=limit)
    return candidates(call.shape, GPU.current(), limit=limit, itemsize=numbers.dtype.itemsize)


def measure(name: str, calls: Sequence[Call], numbers: Numbers, limit: int) -> dict[str, Any]:
    """Time and check all calls of a network; prints a table and returns the raw figures."""
    distinct, gpu = list(dict.fromkeys(calls)), GPU.current()
    tried = {call: {_name(t): t for t in tilings(call, numbers, limit)} for call in distinct}
    begin = time.perf_counter()
    compile_all([Tensors(call, numbers).job(t) for call in distinct for t in tried[call].values()], gpu=gpu)
    kernels = sum(map(len, tried.values()))
    print(f"{name}: {len(calls)} calls, {len(distinct)} distinct; {kernels} kernels compiled in", end=" ")
    print(f"{time.perf_counter() - begin:.1f} s")
    pool, timer = WeightPool(gpu), GraphTimer(gpu)
    measured = []
    for call in distinct:
        found = measure_call(call, calls.count(call), tried[call], pool, timer, numbers)
        print(_line(found), flush=True)
        measured.append(found)
    networks = measure_network(calls, {m.call: m for m in measured}, pool, timer, numbers)
    sums = {
        "theirs": sum(m.count * m.theirs for m in measured),
        "ours": sum(m.count * m.choice.microseconds[m.ours] for m in measured),
        "the better": sum(m.count * min(m.choice.microseconds.values()) for m in measured),
    }
    for title, figures in (("sum of the calls alone, us", sums), ("all in one graph, us", networks)):
        print(f"{title}: " + ", ".join(f"{key} {value:.1f}" for key, value in figures.items()))
    return {
        "environment": describe(),
        "sums": sums,
        "networks": networks,
        "calls": [{"call": str(m.call), "count": m.count, "us": dict(m.choice.microseconds)} for m in measured],
    }


def measure_call(
    call: Call, count: int, tilings: dict[str, AnyTiling], pool: WeightPool, timer: GraphTimer, numbers: Numbers
) -> Measured:
    """Check and time the library's call and each candidate of ours."""
    tensors, depth = Tensors(call, numbers), _depth(call)
    rows = (torch.randn((call.shape.out_channels, depth), device="cuda") / depth**0.5).to(numbers.dtype)
    expected = tensors.expected(rows)
    error = max(_error(tensors, rows, tiling, expected) for tiling in tilings.values())
    sides: dict[str, Callable[[int], object]] = {THEIRS: _chain_of_theirs(tensors, pool, timer.length)}
    for label, tiling in tilings.items():
        sides[label] = _chain_of_ours(tensors, tiling, pool, timer.length)
    return Measured(call=call, count=count, choice=choose(sides, timer), tilings=tilings, error=error)


def _error(tensors: Tensors, rows: Tensor, tiling: AnyTiling, expected: Tensor) -> float:
    """The largest error of a candidate, relative to the results' standard deviation; its counters must end at zero."""
    packed, arrived = _pack(tensors, rows, tiling), _counters(tensors.call.shape, tiling)
    results = [tensors.ours(packed, tiling, arrived) for _ in range(3)]
    assert arrived is None or not bool(arrived.any()), f"{tensors.call} {tiling}: counters are left at {arrived}"
    same = all(torch.equal(result, results[0]) for result in results)
    assert same, f"{tensors.call} {tiling}: three runs differ"
    error = float((results[0].float() - expected).abs().max() / expected.std())
    if not error < TOLERANCE * max(1.0, float(expected.abs().max() / expected.std()) / 4):
        print(f"WRONG: {tensors.call} {tiling.numbers}: error {error:.4f}")
    return error


def _taken(pool: WeightPool, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
    return pool.take(torch.empty(shape, dtype=tensors.x.dtype, device="meta"))


def _chain_of_theirs(tensors: Tensors, pool: WeightPool, length: int) -> Callable[[int], object]:
    weights = [_taken(pool, tensors, (tensors.call.shape.out_channels, _depth(tensors.call))) for _ in range(length)]
    prepared, sharers = tensors.prepared(), tensors.call.sharers
    return lambda n: tensors.theirs(weights[n], prepared if n % sharers else None)


def _chain_of_ours(tensors: Tensors, tiling: AnyTiling, pool: WeightPool, length: int) -> Callable[[int], object]:
    weights = [_taken(pool, tensors, packed(tensors.call, tiling)) for _ in range(length)]
    arrived = [_counters(tensors.call.shape, tiling) for _ in range(length)]
    return lambda n: tensors.ours(weights[n], tiling, arrived[n])


def measure_network(
    calls: Sequence[Call],
    measured: dict[Call, Measured],
    pool: WeightPool,
    timer: GraphTimer,
    numbers: Numbers,
) -> dict[str, float]:
    """Microseconds of all calls of a network in one graph, in order, each with weights of its own."""
    best = {call: m.tilings[m.ours] for call, m in measured.items()}
    tensors = {call: Tensors(call, numbers) for call in measured}
    jobs = [tensors[call].job(tiling, trigger) for call, tiling in best.items() for trigger in TRIGGERS]
    compile_all(jobs, gpu=GPU.current())

    def theirs(call: Call) -> Callable[[], object]:
        return partial(tensors[call].theirs, _taken(pool, tensors[call], (call.shape.out_channels, _depth(call))))

    def ours(call: Call, trigger: str = "late") -> Callable[[], object]:
        weight = _taken(pool, tensors[call], packed(call, best[call]))
        return partial(tensors[call].ours, weight, best[call], _counters(call.shape, best[call]), trigger)

    def better(call: Call) -> Callable[[], object]:
        return theirs(call) if measured[call].choice.best == THEIRS else ours(call)

    sides: Mapping[str, Callable[[Call], Callable[[], object]]] = {
        "theirs": theirs,
        "the better": better,
        **{f"ours, {trigger}": partial(ours, trigger=trigger) for trigger in TRIGGERS},
    }
    return {name: timer.chain([side(call) for call in calls], flush=False) for name, side in sides.items()}


def _depth(call: Call) -> int:
    """Products in each sum of a result."""
    return call.shape.depth // (call.shape.channels if call.kind == "depthwise" else 1)


def _pack(tensors: Tensors, rows: Tensor, tiling: AnyTiling) -> Tensor:
    if isinstance(tiling, DepthwiseTiling):
        return pack_depthwise(tensors.images(rows), tiling)
    return pack_rows(rows, tiling)


def packed(call: Call, tiling: AnyTiling) -> tuple[int, ...]:
    """The shape of the weights, packed."""
    if isinstance(tiling, DepthwiseTiling):
        return ceil_div(call.shape.channels, tiling.block_c), _depth(call), tiling.block_c
    across, deep = ceil_div(call.shape.out_channels, tiling.block_n), tiling.steps(call.shape)
    return across, deep, tiling.block_n, tiling.block_k


def _counters(shape: Convolution, tiling: AnyTiling) -> Tensor | None:
    if isinstance(tiling, DepthwiseTiling) or tiling.split_k == 1:
        return None
    down, across = tiling.tiles(shape)
    return counters(down * across, torch.device("cuda"))


def _name(tiling: AnyTiling) -> str:
    return "x".join(map(str, tiling.numbers))


def _line(found: Measured) -> str:
    times = found.choice.microseconds
    ours = sorted(found.tilings, key=times.__getitem__)[:3]
    tried = "  ".join(f"{label} {times[label]:.2f}" for label in ours)
    return f"{found.count:3d} x {found.call!s:38s} theirs {found.theirs:6.2f}  error {found.error:.1e}  ours {tried}"


if __name__ == "__main__":
    main()
