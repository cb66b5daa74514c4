"""Our own attention against torch's, in the shapes of some networks.

``python -m bench.attention_kernel`` on a Hopper GPU compiles all candidates side by side, checks each
against torch in float32, and times it in a chain of calls in one graph beside
scaled_dot_product_attention.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.environment import describe
from nimblec.kernels.attention import (
    Attention,
    AttentionTiling,
    attended,
    attention,
    attention_candidates,
    attention_job,
    attention_settings,
    attention_shape,
)
from nimblec.kernels.choosing import Choice, choose
from nimblec.kernels.compiling import compile_all
from nimblec.kernels.timing import GraphTimer

THEIRS = "theirs"
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest result, which a rounding of the weights and one of the results stay within."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Attention of one network, batch 1; queries, keys and values lie in the result of one product."""

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
        return (*(x.transpose(1, 2) for x in (query, key, value)), mask)

    def _projected(self, tokens: int, parts: int) -> Tensor:
        return torch.randn((1, tokens, parts, self.heads, self.size), device="cuda", dtype=self.dtype)


CASES: Mapping[str, Case] = {
    "BERT-base, 128 tokens": Case(heads=12, queries=128, size=64),
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
    rows = measure(given.limit)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        figures = {"environment": describe(), "cases": rows}
        (given.out / "attention_kernel.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s in all")


def measure(limit: int) -> list[dict[str, Any]]:
    """Print a line for each case; the raw figures."""
    prepared = {name: Prepared(case, limit) for name, case in CASES.items()}
    begin = time.perf_counter()
    jobs = [job for each in prepared.values() for job in each.jobs()]
    compile_all(jobs)
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - begin:.1f} s")
    timer = GraphTimer(repeats=7)
    rows = []
    for name, each in prepared.items():
        error, choice = each.error(), each.timed(timer)
        print(f"{name:28s} {_line(choice)}  error {error:.4f}", flush=True)
        rows.append({"case": name, "error": error, "us": dict(choice.microseconds)})
    return rows


class Prepared:
    """A case with its tensors and candidates."""

    def __init__(self, case: Case, limit: int) -> None:
        self.case = case
        self.tensors = case.tensors()
        self.shape: Attention = attention_shape(*self.tensors, causal=case.causal)
        self.scale = case.size**-0.5
        candidates = attention_candidates(self.shape, limit=limit)
        self.tilings = {"x".join(map(str, tiling.numbers)): tiling for tiling in candidates}

    def jobs(self) -> list[Any]:
        """What to compile, with programmatic launch and without."""
        dtype = str(self.case.dtype).removeprefix("torch.")
        mask = dtype if self.case.bias else None
        return [
            attention_job(
                attention_settings(self.shape, tiling, scale=self.scale, programmatic=True), dtype=dtype, mask=mask
            )
            for tiling in self.tilings.values()
        ]

    def ours(self, tiling: AttentionTiling) -> Tensor:
        """Our op."""
        return attention(*self.tensors, self.case.causal, self.scale, tiling.numbers, True)

    def theirs(self) -> Tensor:
        """Torch's op, whichever kernel it chooses."""
        query, key, value, mask = self.tensors
        return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=self.case.causal)

    def error(self) -> float:
        """The largest error of a candidate as a part of the largest result; says which are wrong."""
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
        """All candidates beside torch's op, in chains."""
        sides: dict[str, Callable[[int], object]] = {THEIRS: lambda _: self.theirs()}
        for name, tiling in self.tilings.items():
            sides[name] = lambda _, tiling=tiling: self.ours(tiling)  # type: ignore[misc]
        return choose(sides, timer)


def _line(choice: Choice) -> str:
    times = choice.microseconds
    ours = sorted(times.keys() - {THEIRS}, key=times.__getitem__)
    tried = "  ".join(f"{name} {times[name]:.2f}" for name in ours[:5])
    return f"theirs {times[THEIRS]:6.2f}  ours {tried} .. {times[ours[-1]]:.2f}"


if __name__ == "__main__":
    main()
