"""One plan for all sizes, compared with static plans; prints one JSON object of figures and nothing else.

Usage: python -m bench.sizes_peer LEVEL MODEL [--sizes 1..64] [--between 3,6] [--workers 8] [--cpu] [--turns]; MODEL is
a callable of bench.models.sized; --between names sizes to call in addition to the profiles', by default those halfway
between them. The static plans are compiled in parallel; the plan for all sizes then reuses their measured times, so
that both have the same kernels. --cpu uses the CPU target, for which LEVEL has no effect.

By size: call_us, the wall clock of a call from tensors on the GPU to new arrays there, synchronised; numpy_us, the same
from arrays to arrays; kernels_us, only at a profile's size, the GPU time of its program. static_call_us and so on are
those of the static plan of the profile that serves the size, called with its full size.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import clocks, reference
from bench.compiling import compiled
from bench.models.sized import Sized
from bench.nimblec_peer import gpu_us, placed
from bench.peer_calls import wall_us
from bench.turns import Scenario, add_model, peer_parser, run_peer
from nimblec.base.options import read_options, read_sizes
from nimblert.check.verify import read_plan
from nimblert.errors import InputError
from nimblert.executable import Executable
from nimblert.loading import load
from nimblert.plan import Plan, Target

_SEED = 0
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""The number of processes that each compilation starts, all of which import torch."""


def built(spec: str) -> Sized:
    """Return the network named ``package.module:callable``, the same in every process."""
    torch.manual_seed(_SEED)
    network: Sized = resolve_name(spec)()
    return network


class Plans:
    """Plans of a network, which is exported once, for different sets of sizes."""

    def __init__(self, network: Sized, folder: Path, *, target: str, level: int | None) -> None:
        program, self._dimension = network.export()
        self._network, self._folder, self._target, self._level = network, folder, target, level
        torch.export.save(program, folder / "model.pt2")

    def path(self, sizes: Sequence[int]) -> Path:
        """Return the path of the plan for ``sizes``."""
        return self._folder / f"{'_'.join(map(str, sizes))}.plan"

    def compile(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Write the plan for ``sizes``, and its measured times to a file next to it."""
        path = self.path(sizes)
        options = read_options(
            target=self._target,
            level=self._level,
            dims={self._dimension: sizes},
            pad_masks=self._network.pad_masks if len(sizes) > 1 else (),
            timing_cache=path.with_suffix(".timings"),
            plan_cache=None,
        )
        return compiled(str(self._folder / "model.pt2"), options, path)[1]

    def compile_all(self, sizes: Sequence[int], workers: int) -> dict[str, Any]:
        """Write a static plan for each size, then the plan for all sizes, which reuses the measured times."""
        share = int(os.environ.get(_THREADS) or os.cpu_count() or 1)
        os.environ[_THREADS] = str(max(1, share // min(workers, len(sizes))))
        with ThreadPoolExecutor(workers) as pool:
            static = dict(zip(sizes, pool.map(self.compile, [(size,) for size in sizes]), strict=True))
        os.environ[_THREADS] = str(share)
        known: dict[str, int] = {}
        for size in sizes:
            known |= _times(self.path((size,)))
        self.path(sizes).with_suffix(".timings").write_text(json.dumps(known))
        return {"static": {str(size): figures for size, figures in static.items()}, **self.compile(sizes)}


def _times(plan: Path) -> dict[str, int]:
    path = plan.with_suffix(".timings")
    found: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    return found


def described(path: Path) -> dict[str, int]:
    """Return the bytes of a plan's file, weights, code and arena."""
    plan = read_plan(path)
    return {
        "file_nbytes": path.stat().st_size,
        "weights_nbytes": plan.weights_nbytes,
        "code_nbytes": sum(module.code.nbytes for module in plan.modules),
        "arena_nbytes": plan.arena_nbytes,
    }


def middles(sizes: Iterable[int]) -> list[int]:
    """Return the sizes halfway between 0 and the first of ``sizes``, and between neighbours."""
    found = [(below + above + 1) // 2 for below, above in pairwise((0, *sizes))]
    return [middle for middle in found if middle not in sizes]


class Sizes:
    """The executable for all sizes and the static ones, and inputs of any size."""

    def __init__(
        self, network: Sized, path: Callable[[Sequence[int]], Path], sizes: Sequence[int], opened: ExitStack
    ) -> None:
        """Load the plans that ``path`` returns for some sizes; ``opened`` closes the executables."""
        self._network = network
        self._sizes = sizes
        self._path = path(sizes)
        self._opened = opened
        self.plan: Plan = read_plan(self._path)
        self._whole = opened.enter_context(load(self._path, warm=True))
        self._static = {size: opened.enter_context(load(path((size,)))) for size in sizes}

    def served_by(self, size: int) -> int:
        """Return the profile that serves a size."""
        return min(profile for profile in self._sizes if profile >= size)

    def compared(self, size: int) -> dict[str, Any]:
        """Compare the plan's outputs at a size with those of the static plan that serves it, called with padding."""
        profile = self.served_by(size)
        given = self._network.draw(size, _SEED)
        row: dict[str, Any] = {"served_by": profile}
        try:
            found = _outputs(self._whole, given)
        except InputError as exc:
            return {**row, "refused": str(exc)}
        whole = _outputs(self._static[profile], [self._padded(tensor, profile) for tensor in given])
        expected = [array[tuple(map(slice, part.shape))] for array, part in zip(whole, found, strict=True)]
        equal = all(map(np.array_equal, found, expected))
        return {**row, "equal": equal, "difference": reference.error(found, expected)}

    def _padded(self, tensor: Tensor, size: int) -> Tensor:
        axis, length = self._network.axis, tensor.shape[self._network.axis]
        rest = tensor.new_zeros(()).expand([size - length if n == axis else m for n, m in enumerate(tensor.shape)])
        return torch.cat((tensor, rest), axis)

    def groups(self, size: int) -> dict[str, Callable[[], clocks.Samples]]:
        """Return the clocks to sample at a size."""
        profile = self.served_by(size)
        static, own, whole = self._static[profile], self._network.draw(profile, _SEED), self._whole
        given = self._network.draw(size, _SEED)
        found: dict[str, Callable[[], clocks.Samples]] = {}
        found["numpy"] = partial(_both, "numpy_us", size, (whole, _hosts(given)), (static, _hosts(own)))
        if self.plan.target is Target.CUDA:
            ours, theirs = [tensor.cuda() for tensor in given], [tensor.cuda() for tensor in own]
            found["call"] = partial(_both, "call_us", size, (whole, ours), (static, theirs))
            if size == profile:
                alone = self._opened.enter_context(placed(self._path, program=self._named(size)))
                found["kernels"] = lambda: {
                    f"kernels_us {size}": gpu_us(alone),
                    f"static_kernels_us {size}": gpu_us(static),
                }
        return {f"{name} {size}": sample for name, sample in found.items()}

    def _named(self, size: int) -> str:
        return next(program.name for program in self.plan.programs if program.profile[0][1] == size)


def _both(
    clock: str, size: int, whole: tuple[Executable, Sequence[Any]], static: tuple[Executable, Sequence[Any]]
) -> clocks.Samples:
    """Sample both plans' calls."""
    return {
        f"{kind}{clock} {size}": wall_us(partial(executable, *arrays))
        for kind, (executable, arrays) in (("", whole), ("static_", static))
    }


def _hosts(tensors: Iterable[Tensor]) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tensors]


def _outputs(executable: Executable, tensors: Sequence[Tensor]) -> list[np.ndarray]:
    named = zip((tensor.name for tensor in executable.inputs), _hosts(tensors), strict=True)
    return list(executable.run(dict(named)).values())


def prepare(options: argparse.Namespace, folder: Path, opened: ExitStack) -> Scenario:
    """Compile the plans, and compare their outputs."""
    network = built(options.model)
    sizes = options.sizes or read_sizes(f"1..{network.largest}")
    asked = sorted({*sizes, *(options.between or middles(sizes))})
    target, level, workers = ("cpu", None, 1) if options.cpu else ("cuda", options.level, options.workers)
    plans = Plans(network, folder, target=target, level=level)
    figures = plans.compile_all(sizes, workers)
    for size in sizes:
        figures["static"][str(size)] |= described(plans.path((size,)))
    executables = Sizes(network, plans.path, sizes, opened)
    figures["sizes"] = {str(size): executables.compared(size) for size in asked}
    served = [size for size in asked if "refused" not in figures["sizes"][str(size)]]
    groups = {name: sample for size in served for name, sample in executables.groups(size).items()}
    fits = {program.profile[0][1]: program.fits[0].name.lower() for program in executables.plan.programs}
    figures |= {**described(plans.path(sizes)), "fits": fits}
    return Scenario(measure=lambda: clocks.quietest(groups), facts=lambda: figures)


def main() -> None:
    """Measure the network named ``package.module:callable``."""
    parser = peer_parser(__doc__, model=False)
    parser.add_argument("level", type=int)
    add_model(parser)
    parser.add_argument("--sizes", type=read_sizes, help="sizes of the profiles; by default powers of two")
    parser.add_argument("--between", type=read_sizes)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="compilations in parallel")
    parser.add_argument("--cpu", action="store_true")
    run_peer(parser, prepare)


if __name__ == "__main__":
    main()
