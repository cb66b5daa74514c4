"""The gain of streams on the CPU: branching models on one stream, on two, and with `auto`.

Usage: ``python -m bench.cpu_streams [--markdown] [--repeats 300]``. Writes bench/results/cpu/streams.json, or prints
its table with --markdown. Every plan is compiled here, including its timings; the three alternate on the same input,
in one process in which each session has its own threads. On one stream ONNX Runtime's threads may share a kernel; on
two streams each stream has one core. The outputs must be equal bit for bit.
"""

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import environment
from bench.clocks import spread
from bench.cpu_overhead import timed
from bench.tables import by_columns
from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblert import golden
from nimblert.loading import load
from nimblert.plan import Launch

if TYPE_CHECKING:
    from nimblert.executable import Executable

RESULTS = Path(__file__).parent / "results" / "cpu" / "streams.json"
POLICIES = ("1", "2", "auto")


def inception(width: int, blocks: int, pixels: int) -> tuple[Any, tuple[Any, ...]]:
    """Return blocks of four branches (tests/support/families/inception.py)."""
    import torch
    from families.inception import Inception

    return Inception(width=width, blocks=blocks).eval(), (torch.randn(1, 3, pixels, pixels),)


def towers(size: int, steps: int) -> tuple[Any, tuple[Any, ...]]:
    """Return two recurrent towers side by side, joined at the end."""
    import torch

    class Towers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.document = (torch.nn.GRU(size, size, 2, batch_first=True) for _ in range(2))
            self.score = torch.nn.Linear(2 * size, 1)

        def forward(self, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
            left, right = self.query(query)[0], self.document(document)[0]
            return self.score(torch.cat((left[:, -1], right[:, -1]), 1))

    return Towers().eval(), (torch.randn(1, steps, size), torch.randn(1, steps, size))


CASES: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "inception-like, 8 blocks, 32 wide, 80 px": lambda: inception(32, 8, 80),
    "inception-like, 16 blocks, 32 wide, 64 px": lambda: inception(32, 16, 64),
    "two GRU towers, 192 wide, 64 steps": lambda: towers(192, 64),
}


def alternated(runs: Sequence[Callable[[], object]], repeats: int) -> np.ndarray:
    """Return the milliseconds of each of ``repeats`` calls (rows) of each function (columns), after warm-ups.

    Functions alternate after ten calls: if they did after each, every call would find caches and threads of the other.
    """
    for run in runs:
        for _ in range(18):
            run()
    firsts = range(0, repeats, 10)
    return np.concatenate([np.column_stack([timed(run, min(10, repeats - n)) for run in runs]) for n in firsts])


def measure(build: Callable[[], tuple[Any, tuple[Any, ...]]], folder: Path, repeats: int) -> dict[str, Any]:
    """Return the figures of one model under each policy."""
    import torch

    torch.manual_seed(0)
    module, args = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        torch.onnx.export(module, args, folder / "model.onnx", dynamo=False)
    with ExitStack() as stack:
        loaded: dict[str, Executable] = {}
        for policy in POLICIES:
            times = folder / f"timings_{policy}.json"
            options = Options(target="cpu", streams=policy, timing_cache=times, plan_cache=None)
            made = compile_model(str(folder / "model.onnx"), options=options, observer=lambda *_: None)
            loaded[policy] = stack.enter_context(load(made.plan))
        inputs = golden.draw_inputs(loaded["1"].program, 0)
        outputs = [executable.run(inputs) for executable in loaded.values()]
        exact = all(np.array_equal(a, b) for o in outputs for a, b in zip(o.values(), outputs[0].values(), strict=True))
        before = os.getloadavg()[0]
        measured = alternated([executable.replay for executable in loaded.values()], repeats)
        return {
            "launches": sum(isinstance(command, Launch) for command in loaded["1"].program.commands),
            "auto": loaded["auto"].program.schedule.policy if loaded["auto"].program.schedule else "",
            "streams": {policy: executable.program.stream_count for policy, executable in loaded.items()},
            "ms": {policy: spread(column) for policy, column in zip(POLICIES, measured.T, strict=True)},
            "bit_exact": exact,
            "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        }


def _spread(policy: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda _, row: "{median:.2f} ({p5:.2f} to {p95:.2f})".format(**row["ms"][policy])


COLUMNS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "model": lambda case, _: case,
    "one stream, ms": _spread("1"),
    "two streams, ms": _spread("2"),
    "gain": lambda _, row: f"{row['ms']['1']['median'] / row['ms']['2']['median']:.2f}",
    "auto, ms": _spread("auto"),
    "auto kept": lambda _, row: row["auto"],
}


def markdown(results: dict[str, Any]) -> str:
    """Return the table of docs/measured.md: milliseconds, median (p5 to p95)."""
    return "\n".join([*by_columns(COLUMNS, results["models"].items()), "", environment.provenance(results)])


def main() -> None:
    """Measure every model, or print the table of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    if options.markdown:
        print(markdown(environment.read(RESULTS)))
        return
    results: dict[str, Any] = {"models": {}}
    for case, build in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            results["models"][case] = measure(build, Path(folder), options.repeats)
    environment.write(RESULTS, results)
    print(markdown(environment.read(RESULTS)))


if __name__ == "__main__":
    main()
