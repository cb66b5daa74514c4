"""The options for entry and inputs of the commands that run a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from nimblec.cli import arguments
from nimblert import golden
from nimblert.calls.entries import Entry
from nimblert.errors import InputError
from nimblert.plan import Program
from nimblert.plan.dimensions import Axes, resized

entry_option = click.option(
    "--entry",
    metavar="NAME",
    help="The entry to run, where PLAN has several.  [default: the only one, or main]",
)

input_option = click.option(
    "--input",
    "files",
    type=arguments.NAMED_FILE,
    multiple=True,
    metavar="NAME=FILE.npy",
    help="The array of an input. Inputs not given are drawn from the seed. Repeatable.",
)

seed_option = click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    metavar="S",
    help="The seed of inputs that are not given.",
)

cpu_threads_option = click.option(
    "--cpu-threads",
    type=arguments.PROCESSORS,
    help="How many threads a plan for the CPU computes with, or the processors for them, as in 0,1,2,3.  "
    "[default: one for each core]",
)

weights_option = click.option(
    "--weights",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The file of weights, where PLAN was compiled with --strip-weights.",
)

dim_option = click.option(
    "--dim",
    "dims",
    type=arguments.NAMED_SIZE,
    multiple=True,
    help="The size of a named dimension of inputs that are not given, where PLAN is for several sizes: batch=3. "
    "Repeatable.  [default: that of the given inputs, or of the first program]",
)


def inputs(
    entry: Entry, given: Mapping[str, np.ndarray], seed: int, dims: Sequence[tuple[str, int]] = ()
) -> dict[str, np.ndarray]:
    """Return every input of an entry: those ``given`` by name, the others drawn from a seed.

    Their sizes are ``dims``, else those of the given ones.
    """
    tensors = {tensor.name: tensor for tensor in entry.programs[0].inputs}
    if unknown := [name for name in given if name not in tensors]:
        raise InputError(f"input {unknown[0]!r} is not one of the plan's inputs {list(tensors)}")
    restored = {name: arguments.restore_dtype(array, tensors[name]) for name, array in given.items()}
    _check_dims(entry, dims)
    sized = _sized(entry.programs, given, dict(dims))
    try:
        drawn = golden.draw_inputs(sized, seed)
    except (MemoryError, ValueError) as exc:
        # A size beyond the address space raises ValueError.
        raise InputError(f"inputs that are not given cannot be drawn: {exc}") from exc
    return {**drawn, **restored}


def _check_dims(entry: Entry, dims: Sequence[tuple[str, int]]) -> None:
    """Raise InputError for a name that is not a dimension of the entry, or that is given twice."""
    known = [name for name, _ in entry.programs[0].profile]
    sizes: dict[str, int] = {}
    for name, size in dims:
        if name not in known:
            found = f"has no dimension of that name; the names are {', '.join(map(repr, known))}"
            raise InputError(f"--dim {name}: {entry.name!r} {found if known else 'is for one size: leave --dim out'}")
        if sizes.setdefault(name, size) != size:
            raise InputError(f"--dim {name}: given twice, {sizes[name]} and {size}; give it once")


def _sized(programs: Sequence[Program], given: Mapping[str, np.ndarray], dims: Mapping[str, int]) -> Program:
    """Return the program for these sizes, or the nearest one with its inputs resized to them; else the first."""
    axes = Axes(programs)
    sizes = dict(dims)
    for tensor, of in axes.of_inputs(programs[0]):
        if tensor.name in given and given[tensor.name].ndim == len(of):
            found = {name: n for name, n in zip(of, given[tensor.name].shape, strict=True) if name}
            for name, size in found.items():
                if dims.get(name, size) != size:
                    raise InputError(f"--dim {name}: {dims[name]}, and input {tensor.name!r} has the size {size}")
            sizes = found | sizes
    nearest = max(programs, key=lambda program: sum(sizes.get(name) == size for name, size in program.profile))
    return replace(nearest, inputs=tuple(replace(t, shape=resized(t, of, sizes)) for t, of in axes.of_inputs(nearest)))
