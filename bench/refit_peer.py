"""Refits of a plan, compared with copies and with a fresh plan; prints one JSON object of figures and nothing else.

Usage: python -m bench.refit_peer LEVEL MODEL OTHER [--cpu] [--turns]; OTHER is MODEL with other weights. Both plans are
compiled with --refittable, on one stream, the second with the times measured for the first: if both have the same
kernels ("same_kernels"), results after the refit must equal those of the second plan.

refit_us: the wall clock of a refit from pageable arrays, until it is done. copies_us: that of copying each of these
arrays to the GPU; copy_us: of copying as many bytes at once. refit_locked_us, copies_locked_us and copy_locked_us are
from page-locked memory. kernels_us and kernels_after_us: GPU time of a replay without a refit and after one. --cpu uses
the CPU target, for which LEVEL has no effect and copy_us is a copy in memory.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bench import clocks, compiling, reference
from bench.nimblec_peer import gpu_us, placed
from bench.peer_calls import wall_us
from bench.turns import Scenario, add_model, peer_parser, run_peer
from nimblert import golden
from nimblert.cuda.driver import Context, call
from nimblert.cuda.memory import allocate, host_bytes
from nimblert.executable import Executable
from nimblert.loading import load
from nimblert.plan import Launch, Plan

_SEED = 3
_ALIGNMENT = 512

Arrays: TypeAlias = Mapping[str, np.ndarray]
Groups: TypeAlias = dict[str, Callable[[], clocks.Samples]]


def weights(spec: str) -> dict[str, np.ndarray]:
    """Return the weights of a model as arrays in C order."""
    module, _, _ = reference.seeded(spec)
    tensors = module.state_dict().items()
    return {name: reference.as_array(each) for name, each in tensors if each.is_floating_point() and each.ndim}


def launches(plan: Plan) -> list[tuple[object, ...]]:
    """Return kernel, grid and block of each launch."""
    commands = (command for command in plan.programs[0].commands if isinstance(command, Launch))
    return [(plan.kernels[each.kernel].symbol, each.grid, each.block) for each in commands]


def compared(loaded: Executable, fresh: Path, given: Arrays) -> dict[str, Any]:
    """Refit, and compare the results with those of a plan compiled with the same weights."""
    inputs = golden.draw_inputs(loaded.program, _SEED)
    before = loaded.run(inputs)
    with load(fresh) as other:
        wanted = other.run(inputs)
        same_kernels = launches(loaded.plan) == launches(other.plan)
    loaded.refit(given)
    after = loaded.run(inputs)
    return {
        "same_kernels": same_kernels,
        "equal": all(np.array_equal(after[name], array) for name, array in wanted.items()),
        "changed": any(not np.array_equal(before[name], array) for name, array in wanted.items()),
        "difference": reference.error(list(after.values()), list(wanted.values())),
    }


class Copies:
    """Copies of arrays to the GPU, from pageable and from page-locked memory, which the context owns."""

    def __init__(self, context: Context, arrays: Arrays) -> None:
        self._pageable = arrays
        nbytes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
        self._target = allocate(context, sum(nbytes))
        address = int(context.acquire(call("cuMemHostAlloc", sum(nbytes), 0), "cuMemFreeHost"))
        self._whole_locked = host_bytes(address, sum(nbytes))
        self._whole = np.zeros_like(self._whole_locked)
        self._locked: dict[str, np.ndarray] = {}
        for (name, array), start in zip(arrays.items(), accumulate(nbytes[:-1], initial=0), strict=True):
            part = self._whole_locked[start : start + array.nbytes]
            self._locked[name] = part.view(array.dtype).reshape(array.shape)
            np.copyto(self._locked[name], array)

    def groups(self, loaded: Executable) -> Groups:
        """Return the clocks to sample: refits of an executable, and copies."""
        kinds = (("", self._pageable, self._whole), ("_locked", self._locked, self._whole_locked))
        found: Groups = {}
        for kind, arrays, whole in kinds:
            works = {
                "refit": partial(loaded.refit, arrays),
                "copies": partial(self._copy, [*arrays.values()]),
                "copy": partial(self._copy, [whole]),
            }
            found |= {f"{name}{kind}": partial(_timed, f"{name}{kind}_us", work) for name, work in works.items()}
        return found

    def _copy(self, arrays: Iterable[np.ndarray]) -> None:
        to = self._target
        for array in arrays:
            call("cuMemcpyHtoD", to, array.ctypes.data, array.nbytes)
            to += array.nbytes


def host_groups(loaded: Executable, given: Arrays) -> Groups:
    """Return the clocks to sample on the CPU target."""
    source = np.concatenate([array.reshape(-1).view(np.uint8) for array in given.values()])
    works = {"refit": partial(loaded.refit, given), "copy": partial(np.copyto, np.empty_like(source), source)}
    return {name: partial(_timed, f"{name}_us", work) for name, work in works.items()}


def device_groups(plan: Path, loaded: Executable, given: Arrays, opened: ExitStack) -> Groups:
    """Return the clocks to sample on a GPU."""
    untouched = opened.enter_context(placed(plan))
    context = Context()
    opened.callback(context.close)
    groups: Groups = {"kernels": lambda: {"kernels_us": gpu_us(untouched), "kernels_after_us": gpu_us(loaded)}}
    return groups | Copies(context, given).groups(loaded)


def _timed(clock: str, work: Callable[[], object]) -> clocks.Samples:
    return {clock: wall_us(work)}


def prepared(specs: Sequence[str], folder: Path, level: int | None) -> tuple[list[Path], dict[str, Any]]:
    """Return the plans of a model with its weights and with others, and the figures of their compilation."""
    paths = [folder / "model.plan", folder / "other.plan"]
    how = compiling.options(folder, level, refittable=True, streams="1")
    (_, first), (_, second) = (compiling.compiled(spec, how, path) for spec, path in zip(specs, paths, strict=True))
    return paths, {**first, "fresh_s": second["prepare_s"]}


def prepare(options: argparse.Namespace, folder: Path, opened: ExitStack) -> Scenario:
    """Compile, refit and compare."""
    level = None if options.cpu else options.level
    (path, fresh), figures = prepared((options.model, options.other), folder, level)
    loaded = opened.enter_context(load(path))
    own = weights(options.other)
    given = {name: own[name] for name in loaded.weights}
    figures |= compared(loaded, fresh, given)
    groups = host_groups(loaded, given) if options.cpu else device_groups(path, loaded, given, opened)
    figures |= {
        "weights": len(given),
        "weights_nbytes": sum(array.nbytes for array in given.values()),
        "kept": sorted(own.keys() - given.keys()),
        "commands": sum(len(refit.commands) for refit in loaded.plan.refits),
        "file_nbytes": path.stat().st_size,
    }
    return Scenario(measure=lambda: clocks.quietest(groups), facts=lambda: figures)


def main() -> None:
    """Measure the model named ``package.module:callable``."""
    parser = peer_parser(__doc__, model=False)
    parser.add_argument("level", type=int)
    add_model(parser)
    parser.add_argument("other", metavar="OTHER", help="MODEL with other weights")
    parser.add_argument("--cpu", action="store_true")
    run_peer(parser, prepare)


if __name__ == "__main__":
    main()
