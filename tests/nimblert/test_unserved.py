"""The sentence for a call that no program of an entry serves."""

from itertools import product

import numpy as np
import plans
import pytest
from programs import planned, with_program

from nimblert.calls.entries import Signature
from nimblert.errors import InputError
from nimblert.plan import Fit, Program, Region, Tensor
from nimblert.plan.dimensions import Shape

SEQUENCES = (8, 16, 32, 64, 128)
BATCHES = (1, 4)


def program(fits: tuple[Fit, ...], sizes: dict[str, int], inputs: dict[str, Shape]) -> Program:
    """Return a program that takes int64 inputs and does nothing."""
    tensors = tuple(
        Tensor(name=name, dtype="int64", shape=shape, strides=(1,) * len(shape), pointer=plans.pointer(Region.INPUT))
        for name, shape in inputs.items()
    )
    return with_program(planned(), entry="main", profile=tuple(sizes.items()), fits=fits, inputs=tensors)


def encoder(batch: Fit, sequence: Fit) -> list[Program]:
    """Programs for each of `BATCHES` and `SEQUENCES`, of tokens and their mask."""
    return [
        program((batch, sequence), {"batch": n, "sequence": m}, {"ids": (n, m), "mask": (n, m)})
        for n, m in product(BATCHES, SEQUENCES)
    ]


def refused(programs: list[Program], *shapes: Shape) -> str:
    """Return the message for inputs of these shapes."""
    with pytest.raises(InputError) as caught:
        Signature("main", programs).serve([np.empty(shape, np.int8) for shape in shapes])
    return str(caught.value)


def test_inputs_that_disagree_about_a_dimension_are_named() -> None:
    assert refused(encoder(Fit.SPLIT, Fit.PADDED), (20, 100), (20, 50)) == (
        "input 'mask': 'sequence' is 50 at axis 1, and 100 at axis 1 of input 'ids': give both the same size"
    )
    square = [program((Fit.PADDED,), {"side": side}, {"x": (side, side)}) for side in (2, 4)]
    assert refused(square, (3, 4)) == (
        "input 'x': 'side' is 4 at axis 1, and 3 at axis 0 of input 'x': give both the same size"
    )


BY_BATCH = "and 'main' has programs for batch=1, 4: give"
LISTED = "one of these, or compile with --dim"
BY_SEQUENCE = "and 'main' has programs for sequence=8, 16, 32, 64, 128: give"
LONGER = f"{BY_SEQUENCE} {LISTED}"


@pytest.mark.parametrize(
    ("batch", "sequence", "shape", "sentence"),
    [
        (Fit.SPLIT, Fit.PADDED, (20, 129), f"'sequence' is 129 at axis 1, {BY_SEQUENCE} 1 to 128"),
        (Fit.PADDED, Fit.PADDED, (5, 129), f"'batch' is 5 at axis 0, {BY_BATCH} 1 to 4"),
        (Fit.EXACT, Fit.PADDED, (3, 100), f"'batch' is 3 at axis 0, {BY_BATCH} {LISTED} batch=3 among them"),
        (Fit.SPLIT, Fit.EXACT, (20, 100), f"'sequence' is 100 at axis 1, {LONGER} sequence=100 among them"),
        (Fit.SPLIT, Fit.SPLIT, (20, 0), f"'sequence' is 0 at axis 1, {BY_SEQUENCE} 1 to 128"),
        (
            Fit.SPLIT,
            Fit.SPLIT,
            (20, 129),
            f"'batch' is 20 at axis 0, {BY_BATCH} 1 to 4, as calls are split along one dimension alone",
        ),
    ],
)
def test_a_size_without_a_program_is_told_with_those_that_have_one(
    batch: Fit, sequence: Fit, shape: Shape, sentence: str
) -> None:
    assert refused(encoder(batch, sequence), shape, shape) == f"input 'ids': {sentence}"


def test_other_axes_have_the_sizes_of_the_programs() -> None:
    twice = [program((), {"rows": n}, {"x": (n, 3), "y": (2 * n,), "z": ()}) for n in (2, 4)]
    assert refused(twice, (2, 5), (4,), ()) == "input 'x': shape (2, 5), expected (rows, 3)"
    assert refused(twice, (2, 3), (6,), ()) == "input 'y': shape (6,), expected (4 or 8,)"
    assert refused(twice, (2, 3), (4,), (1,)) == "input 'z': shape (1,), expected ()"
    assert refused(twice, (2, 3), (8,), ()) == (
        "inputs of the shapes 'x': (2, 3), 'y': (8,), 'z': (): 'main' has programs for "
        "rows=2 ('x': (2, 3), 'y': (4,), 'z': ()); rows=4 ('x': (4, 3), 'y': (8,), 'z': ())"
    )


def test_sizes_of_which_each_alone_has_a_program() -> None:
    programs = [program((), {"batch": n, "sequence": m}, {"ids": (n, m)}) for n, m in ((1, 128), (8, 32))]
    assert refused(programs, (8, 128)) == (
        "inputs of the shapes 'ids': (8, 128): 'main' has programs for "
        "batch=1, sequence=128 ('ids': (1, 128)); batch=8, sequence=32 ('ids': (8, 32))"
    )


def test_many_programs_of_many_inputs_make_no_long_message() -> None:
    names = [f"key_value_cache.{layer}" for layer in range(60)]
    many = [program((), {"rows": n}, {**dict.fromkeys(names, (n, 64)), "mask": (2 * n,)}) for n in range(1, 129)]
    assert refused(many, *[(200, 64)] * 60, (2,)) == (
        "input 'key_value_cache.0': 'rows' is 200 at axis 0, and 'main' has programs for "
        "rows=1, 2, 3, 4, 5, 6, ..., 128: give one of these, or compile with --dim rows=200 among them"
    )
    assert refused(many, *[(1, 64)] * 60, (3,)) == (
        "input 'mask': shape (3,), expected (2 or 4 or 6 or 8 or 10 or 12 or ... or 256,)"
    )
    assert len(refused(many, *[(2, 64)] * 60, (2,))) < 1500
