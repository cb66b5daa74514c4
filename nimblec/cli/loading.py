"""Plan, entry and inputs, as the commands that run a plan take them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np

from nimblec.cli import arguments
from nimblec.cli.command import OWN_PROCESS
from nimblert import container, golden
from nimblert.context import Entry
from nimblert.errors import InputError
from nimblert.onnx_session import share_thread_pool
from nimblert.plan import Plan, Program, Target

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


def prepared(path: Path) -> Plan:
    """The plan in a file. A CPU plan's sessions share one thread pool if the command line is the program.

    ONNX Runtime then refuses sessions with threads of their own, which a calling program may need.
    """
    plan = container.read(path)
    if plan.target is Target.CPU and click.get_current_context().obj == OWN_PROCESS:
        share_thread_pool()
    return plan


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
