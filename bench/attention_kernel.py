"""Triton attention and norms against torch's, in the shapes of some networks, and in the layers of BERT.

``python -m bench.attention_kernel`` on a Hopper GPU compiles all candidates in parallel, checks each against torch in
float32, and times chains of calls in one graph, of the candidate and of scaled_dot_product_attention or
native_layer_norm. At the end it times twelve layers of BERT, whose products are Triton kernels, with torch's attention
and norms and with ours.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.environment import describe
from nimblec.kernels.choosing import Choice, choose
from nimblec.kernels.compiling import Job, compile_all
from nimblec.kernels.gpu import GPU, TRIGGERS, Trigger
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products.gemm_op import linear
from nimblec.kernels.products.gemm_tilings import Tiling, candidates
from nimblec.kernels.products.packing import counters
from nimblec.kernels.reductions.attention_op import attended, attention
from nimblec.kernels.reductions.attention_shapes import Attention, attention_shape
from nimblec.kernels.reductions.attention_tilings import AttentionTiling, attention_candidates
from nimblec.kernels.reductions.norm_op import add_layer_norm, layer_norm, normalized
from nimblec.kernels.reductions.norm_tilings import Norm, NormTiling, norm_candidates
from nimblec.kernels.shapes import ceil_div, product
from nimblec.kernels.timing import GraphTimer, WeightPool

THEIRS = "theirs"
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest result: rounding the attention weights and the results once stays within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Attention of one network, batch 1; queries, keys and values are slices of one product."""

    heads: int
    queries: int
    size: int
    keys: int | None = None
    causal: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float16

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values (1, heads, tokens, size), and the bias (1, heads, queries, keys)."""
        keys = self.keys or self.queries
        mask = None
        if self.bias:
            mask = torch.randn((1, self.heads, self.queries, keys), device="cuda", dtype=self.dtype)
        query = self._projected(self.queries, 3)[:, :, 0]
        key, value = (self._projected(keys, 3 if keys == self.queries else 2)[:, :, n] for n in (-2, -1))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask

    def _projected(self, tokens: int, parts: int) -> Tensor:
        return torch.randn((1, tokens, parts, self.heads, self.size), device="cuda", dtype=self.dtype)


BERT = "BERT-base, 128 tokens"
CASES: Mapping[str, Case] = {
    BERT: Case(heads=12, queries=128, size=64),
    "GPT-2, 64 tokens": Case(heads=12, queries=64, size=64, causal=True, dtype=torch.bfloat16),
    "ViT-B/16": Case(heads=12, queries=197, size=64),
    "T5-base encoder, 128 tokens": Case(heads=12, queries=128, size=64, bias=True),
    "Whisper-base, 500 frames": Case(heads=8, queries=500, size=64),
    "UNet, 32x32": Case(heads=8, queries=1024, size=40),
    "UNet, 16x16": Case(heads=8, queries=256, size=80),
    "UNet, 32x32 on 77 tokens": Case(heads=8, queries=1024, keys=77, size=40),
}


def main() -> None:
    """Check and time all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=14, help="candidates a case")
    parser.add_argument("--out", type=Path, help="folder for the raw figures")
    given = parser.parse_args()
    torch.manual_seed(0)
    print(describe())
    begin = time.perf_counter()
    norms = [PreparedNorm(name, case) for name, case in NORMS.items()]
    bert = Bert()
    prepared = {name: Prepared(case, given.limit) for name, case in CASES.items()}
    compile_begin = time.perf_counter()
    everything: list[Prepared | PreparedNorm | Bert] = [*prepared.values(), *norms, bert]
    jobs = [job for each in everything for job in each.jobs()]
    compile_all(jobs, gpu=GPU.current())
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - compile_begin:.1f} s")
    timer = GraphTimer(GPU.current(), repeats=7)
    rows = [measure(name, each, timer) for name, each in prepared.items()]
    rows += [measure(each.name, each, timer) for each in norms]
    layers = bert.measure(timer, prepared[BERT], norms[0])
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        figures = {"environment": describe(), "cases": rows, "bert": layers}
        (given.out / "attention_kernel.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s in all")


def measure(name: str, each: "Prepared | PreparedNorm", timer: GraphTimer) -> dict[str, Any]:
    """Print a line for a case; returns the raw figures."""
    error, choice = each.error(), each.timed(timer)
    print(f"{name:28s} {_line(choice)}  error {error:.4f}", flush=True)
    return {"case": name, "error": error, "us": dict(choice.microseconds)}


class Prepared:
    """A case with its tensors and candidates."""

    def __init__(self, case: Case, limit: int) -> None:
        self.case = case
        self.tensors = case.tensors()
        self.shape: Attention = attention_shape(*self.tensors, causal=case.causal)
        self.scale = case.size**-0.5
        candidates = attention_candidates(self.shape, GPU.current(), limit=limit)
        self.tilings = {"x".join(map(str, tiling.numbers)): tiling for tiling in candidates}

    def jobs(self) -> list[Job]:
        """The kernels to compile."""
        return [launch_of(attention, *self._arguments(tiling)).job for tiling in self.tilings.values()]

    def _arguments(self, tiling: AttentionTiling, trigger: Trigger = "late") -> tuple[Any, ...]:
        return (*self.tensors, self.case.causal, self.scale, tiling.numbers, trigger)

    def ours(self, tiling: AttentionTiling, trigger: Trigger = "late") -> Tensor:
        """Our op."""
        return attention(*self._arguments(tiling, trigger))

    def theirs(self) -> Tensor:
        """Torch's op, whichever kernel it chooses."""
        query, key, value, mask = self.tensors
        return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=self.case.causal)

    def error(self) -> float:
        """The largest error of any candidate, relative to the largest result; prints those that are wrong."""
        expected = attended(*self.tensors, causal=self.case.causal, scale=self.scale).transpose(1, 2)
        largest = 0.0
        for name, tiling in self.tilings.items():
            results = [self.ours(tiling) for _ in range(3)]
            error = float((results[0].float() - expected).abs().max() / expected.abs().max())
            largest = max(largest, error)
            if not error < TOLERANCE[self.case.dtype] or not all(torch.equal(r, results[0]) for r in results):
                print(f"WRONG: {self.case} {name}: error {error:.4f}, or three runs differ")
        return largest

    def timed(self, timer: GraphTimer) -> Choice:
        """The times of all candidates and of torch's op, in chains."""
        sides: dict[str, Callable[[int], object]] = {THEIRS: lambda _: self.theirs()}
        for name, tiling in self.tilings.items():
            sides[name] = partial(_ignoring, self.ours, tiling, "late")
        self.times = choose(sides, timer)
        return self.times

    def fastest(self) -> AttentionTiling:
        """The fastest of our candidates; `timed` comes first."""
        return self.tilings[min(self.tilings, key=self.times.microseconds.__getitem__)]


NORMS: Mapping[str, tuple[Norm, bool]] = {
    "norm, BERT": (Norm(rows=128, columns=768), False),
    "sum and norm, BERT": (Norm(rows=128, columns=768), True),
    "norm, ViT-B/16": (Norm(rows=197, columns=768), False),
    "sum and RMS norm, T5": (Norm(rows=128, columns=768, rms=True), True),
    "norm, Whisper-base": (Norm(rows=500, columns=512), False),
}
"""And whether a residual is added first."""
NORM_TRIGGERS: tuple[Trigger, ...] = ("late", "none")


class PreparedNorm:
    """A norm in float16 with its tensors and candidates."""

    def __init__(self, name: str, case: tuple[Norm, bool]) -> None:
        self.name = name
        self.shape, self.adds = case
        size = (self.shape.rows, self.shape.columns)
        self.x, self.residual = (torch.randn(size, device="cuda").half() for _ in range(2))
        self.weight = torch.randn(self.shape.columns, device="cuda").half()
        self.bias = None if self.shape.rms else self.weight.neg()
        self.tilings = {
            "x".join(map(str, tiling.numbers)): tiling for tiling in norm_candidates(self.shape, GPU.current())
        }

    def jobs(self) -> list[Job]:
        """The kernels to compile."""
        op = add_layer_norm if self.adds else layer_norm
        return [
            launch_of(op, *self._arguments(tiling, trigger)).job
            for tiling in self.tilings.values()
            for trigger in NORM_TRIGGERS
        ]

    def ours(self, tiling: NormTiling, trigger: Trigger = "late") -> Tensor:
        """Our op."""
        arguments = self._arguments(tiling, trigger)
        return add_layer_norm(*arguments)[0] if self.adds else layer_norm(*arguments)

    def _arguments(self, tiling: NormTiling, trigger: Trigger) -> tuple[Any, ...]:
        read = (self.x, self.residual) if self.adds else (self.x,)
        return (*read, self.weight, self.bias, 1e-5, self.shape.rms, torch.float16, tiling.numbers, trigger)

    def theirs(self) -> Tensor:
        """Torch's ops."""
        x = self.x + self.residual if self.adds else self.x
        if self.shape.rms:
            return functional.rms_norm(x, x.shape[-1:], self.weight, 1e-5)
        return torch.native_layer_norm(x, x.shape[-1:], self.weight, self.bias, 1e-5)[0]

    def error(self) -> float:
        """The largest error of any candidate, relative to the largest result; prints those that are wrong."""
        x = self.x + self.residual if self.adds else self.x
        expected = normalized(x, self.weight, self.bias, 1e-5, self.shape.rms, torch.float32)
        errors = {name: float((self.ours(t).float() - expected).abs().max()) for name, t in self.tilings.items()}
        largest = float(expected.abs().max())
        for name, error in errors.items():
            if not error <= 1e-3 * largest:
                print(f"WRONG: {self.name} {name}: {error:.4f}")
        return max(errors.values()) / largest

    def timed(self, timer: GraphTimer) -> Choice:
        """The times of all candidates, also with plain launches ("none"), and of torch's ops."""
        sides: dict[str, Callable[[int], object]] = {THEIRS: lambda _: self.theirs()}
        for name, tiling in self.tilings.items():
            for trigger in NORM_TRIGGERS:
                label = name if trigger == "late" else f"{name} {trigger}"
                sides[label] = partial(_ignoring, self.ours, tiling, trigger)
        self.times = choose(sides, timer)
        return self.times

    def fastest(self) -> NormTiling:
        """The fastest of our candidates; `timed` comes first."""
        return self.tilings[min(self.tilings, key=self.times.microseconds.__getitem__)]


class Bert:
    """The layers of BERT-base on 128 tokens; their products are our kernels, each with weights of its own."""

    LAYERS = 12
    PRODUCTS = (
        (768, 2304, "none", False),
        (768, 768, "none", True),
        (768, 3072, "gelu", False),
        (3072, 768, "none", True),
    )
    """Depth, columns, activation and whether a residual is added, in the order of a layer."""

    def __init__(self) -> None:
        self.shapes = [product(128, depth, columns) for depth, columns, *_ in self.PRODUCTS]
        self.tilings: list[Tiling] = [candidates(shape, GPU.current())[0] for shape in self.shapes]

    def jobs(self) -> list[Job]:
        """The kernels to compile."""
        arguments = (self._arguments(number, self._weight(number), "late") for number in range(len(self.PRODUCTS)))
        return [launch_of(linear, *given).job for given in arguments]

    def measure(self, timer: GraphTimer, attended: Prepared, norm: PreparedNorm) -> dict[str, float]:
        """Microseconds of all layers in one graph, by the origin of attention and norms."""
        mixing, norming = attended.fastest(), norm.fastest()
        sides: dict[str, tuple[Callable[[], object], Callable[[], object], Trigger]] = {
            "torch's attention, torch's norms": (attended.theirs, norm.theirs, "late"),
            "torch's attention, our norms, plain": (attended.theirs, partial(norm.ours, norming, "none"), "late"),
            "torch's attention, our norms": (attended.theirs, partial(norm.ours, norming), "late"),
            "our attention, torch's norms": (partial(attended.ours, mixing), norm.theirs, "late"),
            "our attention, our norms, plain": (
                partial(attended.ours, mixing),
                partial(norm.ours, norming, "none"),
                "late",
            ),
        }
        for trigger in TRIGGERS:
            ours = partial(attended.ours, mixing, trigger), partial(norm.ours, norming, trigger)
            sides[f"all ours, trigger {trigger}"] = (*ours, trigger)
        times = {}
        for name, side in sides.items():
            times[name] = timer.chain(self._calls(*side), flush=False)
            print(f"twelve layers of BERT, {name}: {times[name]:.1f} us", flush=True)
        return times

    def _calls(
        self, mix: Callable[[], object], normalize: Callable[[], object], trigger: Trigger
    ) -> list[Callable[[], object]]:
        pool = WeightPool(GPU.current())
        products = [self._product(number, pool, trigger) for _ in range(self.LAYERS) for number in range(4)]
        calls: list[Callable[[], object]] = []
        for first, second, third, fourth in zip(*[iter(products)] * 4, strict=True):
            calls += [first, mix, second, normalize, third, fourth, normalize]
        return calls

    def _product(self, number: int, pool: WeightPool, trigger: Trigger) -> Callable[[], object]:
        return partial(linear, *self._arguments(number, pool.take(self._weight(number)), trigger))

    def _weight(self, number: int) -> Tensor:
        """The weights of a product, without memory."""
        shape, tiling = self.shapes[number], self.tilings[number]
        across = ceil_div(shape.out_channels, tiling.block_n)
        packed = (across, tiling.steps(shape), tiling.block_n, tiling.block_k)
        return torch.empty(packed, dtype=torch.float16, device="meta")

    def _arguments(self, number: int, weight: Tensor, trigger: Trigger) -> tuple[Any, ...]:
        shape, tiling = self.shapes[number], self.tilings[number]
        _, columns, activation, adds = self.PRODUCTS[number]
        x = torch.randn(128, shape.channels, device="cuda").half()
        residual = torch.randn(128, columns, device="cuda").half() if adds else None
        bias = torch.randn(columns, device="cuda").half()
        down, across = tiling.tiles(shape)
        arrived = counters(down * across, x.device) if tiling.split_k > 1 else None
        return x, weight, bias, residual, arrived, columns, activation, tiling.numbers, trigger


def _ignoring(call: Callable[..., object], tiling: object, trigger: Trigger, _: int) -> object:
    return call(tiling, trigger)


def _line(choice: Choice) -> str:
    times = choice.microseconds
    ours = sorted(times.keys() - {THEIRS}, key=times.__getitem__)
    tried = "  ".join(f"{name} {times[name]:.2f}" for name in ours[:5])
    return f"theirs {times[THEIRS]:6.2f}  ours {tried} .. {times[ours[-1]]:.2f}"


if __name__ == "__main__":
    main()
