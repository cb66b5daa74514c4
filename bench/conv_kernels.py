"""Our own kernels against cuDNN's and cuBLAS's, for the convolutions and products of some networks, batch 1.

``python -m bench.conv_kernels --model resnet50`` on a Hopper GPU compiles all candidates side by
side, times each shape's in a chain of calls whose weights are not in the L2 cache, checks every
candidate against torch in float32, and at the end times all calls of the network in one graph.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from bench.environment import describe
from nimblec.kernels import ops
from nimblec.kernels.candidates import candidates
from nimblec.kernels.choosing import Choice, choose
from nimblec.kernels.compiling import Job, compile_all, convolution_job, depthwise_job
from nimblec.kernels.depthwise import (
    DepthwiseTiling,
    depthwise,
    depthwise_candidates,
    depthwise_settings,
    pack_depthwise,
)
from nimblec.kernels.launching import settings
from nimblec.kernels.packing import counters, pack_rows
from nimblec.kernels.reference import finish
from nimblec.kernels.shapes import Convolution, Tiling, ceil_div, product
from nimblec.kernels.timing import GraphTimer, WeightPool

aten = torch.ops.aten

Kind = Literal["convolution", "linear", "depthwise"]
AnyTiling = Tiling | DepthwiseTiling

POOL_NBYTES = 512 << 20
THEIRS = "theirs"
TOLERANCE = 0.02
"""Of the results' spread: float16 and bfloat16 round once, the library's and our sums differ in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call in a network."""

    shape: Convolution
    activation: str
    residual: bool = False
    kind: Kind = "convolution"

    def __str__(self) -> str:
        s = self.shape
        kind = "linear" if self.kind == "linear" else f"{s.kernel[0]}x{s.kernel[1]}/{s.stride[0]}"
        if self.kind == "depthwise":
            return f"depthwise {kind} {s.out_height}x{s.out_width}x{s.channels} {self.activation}"
        end = "+res" if self.residual else ""
        return f"{kind} {s.rows}x{s.depth}x{s.out_channels} {self.activation}{end}"


def resnet50() -> Iterator[Call]:
    """Torchvision's, 224x224; the first block of a stage has a projection beside it."""
    yield _image(224, 3, 64, kernel=7, stride=2, activation="relu")
    size, channels = 56, 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            yield _image(size, channels, width, activation="relu")
            yield _image(size, width, width, kernel=3, stride=stride, activation="relu")
            if not block:
                yield _image(size, channels, 4 * width, stride=stride, activation="none")
            size, channels = size // stride, 4 * width
            yield _image(size, width, channels, activation="relu", residual=True)
    yield Call(shape=product(1, 2048, 1000), activation="none", kind="linear")


def mobilenet_v2() -> Iterator[Call]:
    """Torchvision's, 224x224."""
    yield _image(224, 3, 32, kernel=3, stride=2, activation="relu6")
    yield _depthwise(112, 32)
    yield _image(112, 32, 16, activation="none")
    size, channels = 112, 16
    for width, depth, first in ((24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)):
        for block in range(depth):
            stride = 1 if block else first
            yield _image(size, channels, 6 * channels, activation="relu6")
            yield _depthwise(size, 6 * channels, stride=stride)
            size //= stride
            yield _image(size, 6 * channels, width, activation="none", residual=block > 0)
            channels = width
    yield _image(7, 320, 1280, activation="relu6")
    yield Call(shape=product(1, 1280, 1000), activation="none", kind="linear")


def bert() -> Iterator[Call]:
    """BERT-base, 128 tokens; queries, keys and values in one product."""
    yield from _transformer(128, 12, "gelu")


def gpt2() -> Iterator[Call]:
    """GPT-2, 64 tokens, with its last product over the vocabulary."""
    yield from _transformer(64, 12, "gelu_tanh")
    yield Call(shape=product(64, 768, 50257), activation="none", kind="linear")


def vit() -> Iterator[Call]:
    """ViT-B/16, 197 tokens."""
    yield from _transformer(197, 12, "gelu")


def _transformer(tokens: int, layers: int, activation: str) -> Iterator[Call]:
    for _ in range(layers):
        for depth, columns, then in ((768, 2304, ""), (768, 768, ""), (768, 3072, activation), (3072, 768, "")):
            yield Call(shape=product(tokens, depth, columns), activation=then or "none", kind="linear")


def _depthwise(size: int, channels: int, *, stride: int = 1) -> Call:
    call = _image(size, channels, channels, kernel=3, stride=stride, activation="relu6")
    return replace(call, kind="depthwise")


def _image(
    size: int,
    channels: int,
    out_channels: int,
    *,
    kernel: int = 1,
    stride: int = 1,
    activation: str,
    residual: bool = False,
) -> Call:
    shape = Convolution(
        batch=1,
        height=size,
        width=size,
        channels=channels,
        out_channels=out_channels,
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=(kernel // 2, kernel // 2),
    )
    return Call(shape=shape, activation=activation, residual=residual)


MODELS: dict[str, tuple[Callable[[], Iterator[Call]], torch.dtype]] = {
    "resnet50": (resnet50, torch.float16),
    "mobilenet_v2": (mobilenet_v2, torch.float16),
    "bert": (bert, torch.float16),
    "gpt2": (gpt2, torch.bfloat16),
    "vit": (vit, torch.float16),
}


class Tensors:
    """What all versions of one call read, but for the weights."""

    def __init__(self, call: Call, dtype: torch.dtype) -> None:
        self.call, shape = call, call.shape
        size = (shape.batch, shape.height, shape.width, shape.channels)
        x = torch.randn(size, dtype=dtype, device="cuda")
        out = torch.randn((shape.rows, shape.out_channels), dtype=dtype, device="cuda")
        images = out.view(shape.batch, shape.out_height, shape.out_width, -1).permute(0, 3, 1, 2)
        self.x = x.view(shape.rows, shape.channels) if call.kind == "linear" else x.permute(0, 3, 1, 2)
        self.residual = (out if call.kind == "linear" else images) if call.residual else None
        self.bias = torch.randn(shape.out_channels, dtype=dtype, device="cuda")

    def ours(self, weight: Tensor, tiling: AnyTiling, arrived: Tensor | None, *, programmatic: bool = True) -> Tensor:
        """Our op."""
        call, shape = self.call, self.call.shape
        shared = self.x, weight, self.bias, self.residual, arrived, shape.out_channels
        last = call.activation, tiling.numbers, programmatic
        if call.kind == "linear":
            return ops.linear(*shared, *last)
        geometry = shape.kernel, shape.stride, shape.padding, shape.dilation
        if call.kind == "depthwise":
            return depthwise(*shared[:4], *geometry, *last)
        return ops.convolution(*shared, *geometry, *last)

    def theirs(self, rows: Tensor) -> Tensor:
        """The library's call for weights (out channels, depth), and what it cannot fuse in calls after it."""
        if self.call.kind == "linear":
            return self._linear(rows)
        shape = self.call.shape
        weight = self.images(rows)
        geometry = shape.stride, shape.padding, shape.dilation
        if self.call.activation == "relu" and self.residual is not None:
            return aten.cudnn_convolution_add_relu(self.x, weight, self.residual, 1.0, self.bias, *geometry, 1)
        if self.call.activation == "relu":
            return aten.cudnn_convolution_relu(self.x, weight, self.bias, *geometry, 1)
        total = aten.convolution(self.x, weight, None, *geometry, False, [0, 0], self.groups)
        if self.residual is not None or self.call.activation == "none":
            return total.add_(self.bias[:, None, None] if self.residual is None else self.residual)
        return functional.relu6(total, inplace=True)

    @property
    def groups(self) -> int:
        """As torch counts them."""
        return self.call.shape.channels if self.call.kind == "depthwise" else 1

    def images(self, rows: Tensor) -> Tensor:
        """Weights (out channels, depth) as torch's convolutions take them, channels last."""
        shape = self.call.shape
        return rows.view(shape.out_channels, *shape.kernel, -1).permute(0, 3, 1, 2)

    def _linear(self, rows: Tensor) -> Tensor:
        if self.call.activation == "gelu_tanh":
            return aten._addmm_activation.default(self.bias, self.x, rows.t(), use_gelu=True)  # noqa: SLF001
        total = aten.addmm(self.bias, self.x, rows.t())
        return functional.gelu(total) if self.call.activation == "gelu" else total

    def expected(self, rows: Tensor) -> Tensor:
        """In float32."""
        shape, bias = self.call.shape, self.bias.float()
        if self.call.kind == "linear":
            total = functional.linear(self.x.float(), rows.float(), bias)
        else:
            weight, geometry = self.images(rows).float(), (shape.stride, shape.padding, shape.dilation)
            total = functional.conv2d(self.x.float(), weight, bias, *geometry, self.groups)
        return finish(total, self.residual, self.call.activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The times of one distinct call, and how often the network has it."""

    call: Call
    count: int
    choice: Choice
    tilings: dict[str, AnyTiling]
    error: float

    @property
    def theirs(self) -> float:
        """The library's microseconds."""
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
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(describe())
    for name in given.model:
        begin = time.perf_counter()
        build, dtype = MODELS[name]
        rows = measure(name, list(build()), dtype, given.limit)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / f"conv_kernels_{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - begin:.0f} s in all\n")


def tilings(call: Call, limit: int) -> Sequence[AnyTiling]:
    """The candidates for a call."""
    if call.kind == "depthwise":
        return depthwise_candidates(call.shape, limit=limit)
    return candidates(call.shape, limit=limit)


def measure(name: str, calls: Sequence[Call], dtype: torch.dtype, limit: int) -> dict[str, Any]:
    """Time and check all calls of a network; prints a table and returns the raw figures."""
    distinct = list(dict.fromkeys(calls))
    tried = {call: {_name(t): t for t in tilings(call, limit)} for call in distinct}
    begin = time.perf_counter()
    compile_all([_job(call, tiling, dtype) for call in distinct for tiling in tried[call].values()])
    kernels = sum(map(len, tried.values()))
    print(f"{name}: {len(calls)} calls, {len(distinct)} distinct; {kernels} kernels compiled in", end=" ")
    print(f"{time.perf_counter() - begin:.1f} s")
    pool, timer = WeightPool(nbytes=POOL_NBYTES, dtype=dtype), GraphTimer()
    measured = []
    for call in distinct:
        found = measure_call(call, calls.count(call), tried[call], pool, timer, dtype)
        print(_line(found), flush=True)
        measured.append(found)
    networks = measure_network(calls, {m.call: m for m in measured}, pool, timer, dtype)
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
    call: Call, count: int, tilings: dict[str, AnyTiling], pool: WeightPool, timer: GraphTimer, dtype: torch.dtype
) -> Measured:
    """Check and time the library's call and each candidate of ours."""
    tensors, depth = Tensors(call, dtype), _depth(call)
    rows = (torch.randn((call.shape.out_channels, depth), device="cuda") / depth**0.5).to(dtype)
    expected = tensors.expected(rows)
    error = max(_error(tensors, rows, tiling, expected) for tiling in tilings.values())
    sides: dict[str, Callable[[int], object]] = {THEIRS: _chain_of_theirs(tensors, pool, timer.length)}
    for label, tiling in tilings.items():
        sides[label] = _chain_of_ours(tensors, tiling, pool, timer.length)
    return Measured(call=call, count=count, choice=choose(sides, timer), tilings=tilings, error=error)


def _error(tensors: Tensors, rows: Tensor, tiling: AnyTiling, expected: Tensor) -> float:
    """The largest error of a candidate in units of the results' spread; it must leave its counters at zero."""
    packed, arrived = _pack(tensors, rows, tiling), _counters(tensors.call.shape, tiling)
    results = [tensors.ours(packed, tiling, arrived) for _ in range(3)]
    assert arrived is None or not bool(arrived.any()), f"{tensors.call} {tiling}: counters are left at {arrived}"
    same = all(torch.equal(result, results[0]) for result in results)
    assert same, f"{tensors.call} {tiling}: three runs differ"
    error = float((results[0].float() - expected).abs().max() / expected.std())
    if not error < TOLERANCE * max(1.0, float(expected.abs().max() / expected.std()) / 4):
        print(f"WRONG: {tensors.call} {tiling.numbers}: error {error:.4f}")
    return error


def _chain_of_theirs(tensors: Tensors, pool: WeightPool, length: int) -> Callable[[int], object]:
    size = tensors.call.shape.out_channels, _depth(tensors.call)
    weights = [pool.take(size) for _ in range(length)]
    return lambda n: tensors.theirs(weights[n])


def _chain_of_ours(tensors: Tensors, tiling: AnyTiling, pool: WeightPool, length: int) -> Callable[[int], object]:
    weights = [pool.take(_packed(tensors.call, tiling)) for _ in range(length)]
    arrived = [_counters(tensors.call.shape, tiling) for _ in range(length)]
    return lambda n: tensors.ours(weights[n], tiling, arrived[n])


def measure_network(
    calls: Sequence[Call],
    measured: dict[Call, Measured],
    pool: WeightPool,
    timer: GraphTimer,
    dtype: torch.dtype,
) -> dict[str, float]:
    """All calls of a network in its order in one graph, each with weights of its own; replay after replay."""
    best = {call: m.tilings[m.ours] for call, m in measured.items()}
    compile_all([_job(call, tiling, dtype, programmatic=False) for call, tiling in best.items()])
    tensors = {call: Tensors(call, dtype) for call in measured}

    def theirs(call: Call) -> Callable[[], object]:
        return partial(tensors[call].theirs, pool.take((call.shape.out_channels, _depth(call))))

    def ours(call: Call, *, programmatic: bool = True) -> Callable[[], object]:
        weight = pool.take(_packed(call, best[call]))
        arrived = _counters(call.shape, best[call])
        return partial(tensors[call].ours, weight, best[call], arrived, programmatic=programmatic)

    def better(call: Call) -> Callable[[], object]:
        return theirs(call) if measured[call].choice.best == THEIRS else ours(call)

    sides = {
        "theirs": theirs,
        "ours": ours,
        "the better": better,
        "ours, plain edges": partial(ours, programmatic=False),
    }
    return {name: timer.chain([side(call) for call in calls], flush=False) for name, side in sides.items()}


def _job(call: Call, tiling: AnyTiling, dtype: torch.dtype, *, programmatic: bool = True) -> Job:
    known = {"dtype": str(dtype).removeprefix("torch."), "bias": True, "residual": call.residual}
    how = {"activation": call.activation, "programmatic": programmatic}
    if isinstance(tiling, DepthwiseTiling):
        return depthwise_job(depthwise_settings(call.shape, tiling, **how), **known)
    return convolution_job(settings(call.shape, tiling, **how), **known)


def _depth(call: Call) -> int:
    """Products in each sum."""
    return call.shape.depth // (call.shape.channels if call.kind == "depthwise" else 1)


def _pack(tensors: Tensors, rows: Tensor, tiling: AnyTiling) -> Tensor:
    if isinstance(tiling, DepthwiseTiling):
        return pack_depthwise(tensors.images(rows), tiling)
    return pack_rows(rows, tiling)


def _packed(call: Call, tiling: AnyTiling) -> tuple[int, ...]:
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
    return f"{found.count:3d} x {found.call!s:38s} theirs {found.theirs:6.2f}  error {found.error:.4f}  ours {tried}"


if __name__ == "__main__":
    main()
