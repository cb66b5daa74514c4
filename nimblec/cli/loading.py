"""Plan, entry and inputs, as the commands that run a plan take them."""

from collections.abc import Mapping, Sequence

import click
import numpy as np

from nimblec.cli import arguments
from nimblert import golden
from nimblert.context import Entry
from nimblert.errors import InputError
from nimblert.plan import Program

entry_option = click.option(
    "--entry",
    metavar="NAME",
    help="The entry to run, where PLAN has several.  [default: the only one, or main]",
)

input_option = click.option(
    "--input",
    "files",
    type=arguments.NamedFile(),
    multiple=True,
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
    type=arguments.Processors(),
    help="How many threads a plan for the CPU computes with, or the processors for them, as in 0,1,2,3.  "
    "[default: one for each core]",
)


def inputs(entry: Entry, given: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Every input of an entry: those ``given`` by name, the others drawn from a seed.

    Of an entry for several sizes, they are those of the first that the given inputs fit.
    """
    program = _first_fitting(entry.programs, given)
    tensors = {tensor.name: tensor for tensor in program.inputs}
    if unknown := [name for name in given if name not in tensors]:
        raise InputError(f"input {unknown[0]!r} is not one of the plan's inputs {list(tensors)}")
    restored = {name: arguments.restore_dtype(array, tensors[name]) for name, array in given.items()}
    return {**golden.draw_inputs(program, seed), **restored}


def _first_fitting(programs: Sequence[Program], given: Mapping[str, np.ndarray]) -> Program:
    """The first program whose inputs have the shapes of those given; the first one if none has."""
    for program in programs:
        if all(tensor.shape == given[tensor.name].shape for tensor in program.inputs if tensor.name in given):
            return program
    return programs[0]
