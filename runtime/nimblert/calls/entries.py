"""The entries of a plan: the programs of each, and which of them a call runs.

The programs of an entry differ in their sizes alone: the shapes of the inputs choose one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from nimblert.arrays import device_arrays
from nimblert.arrays.dlpack import DeviceArray
from nimblert.arrays.layouts import numpy_dtype
from nimblert.calls.sizes import Served, Sizes, why_unserved
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Plan, Program, Tensor
from nimblert.plan.dimensions import Shapes, shapes_of

Take: TypeAlias = Callable[[Any, int], DeviceArray]
"""Takes an array of the caller on the GPU of this ordinal, -1 where it is not known."""


class Signature:
    """The inputs of an entry; ``programs`` are those of its profiles."""

    def __init__(self, name: str, programs: Sequence[Program]) -> None:
        self.name = name
        self.programs = tuple(programs)
        self._inputs = {tensor.name: tensor for tensor in self.programs[0].inputs}
        self._names = tuple(self._inputs)
        self._exact = {shapes_of(program.inputs): Served.exactly(program) for program in self.programs}

    def largest(self, side: Literal["input", "output"], name: str) -> Tensor:
        """Return an input or output in the largest of its sizes. Raises InputError where there is none of this name."""
        tensors = [t for program in self.programs for t in (program.inputs if side == "input" else program.outputs)]
        sizes = [tensor for tensor in tensors if tensor.name == name]
        if not sizes:
            names = list(dict.fromkeys(tensor.name for tensor in tensors))
            raise InputError(f"{side} {name!r}: not found, the entry has {names}")
        return max(sizes, key=lambda tensor: tensor.span_nbytes)

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arrays by name, given some in the plan's order and some by name. Raises InputError."""
        names = self._names
        if len(args) == len(names) and not kwargs:
            return dict(zip(names, args, strict=False))
        if len(args) > len(names):
            raise InputError(f"inputs: {len(args)} arrays were given, the plan takes {len(names)}: {list(names)}")
        given = dict(zip(names, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise InputError(f"input {min(twice)!r} was given by position and by name: give it once")
        return {**given, **kwargs}

    def check(self, arrays: Mapping[str, Any], take: Take) -> list[np.ndarray | DeviceArray]:
        """Return the arrays of a call in the entry's order, given by input name; ``take`` is for those on a GPU.

        Raises InputError for names and dtypes that are not the entry's.
        """
        if not isinstance(arrays, Mapping):
            raise InputError(f"inputs: got {type(arrays).__name__}, expected a dict of arrays by input name")
        expected = self._inputs
        if arrays.keys() != expected.keys():
            raise InputError(_wrong_names(list(expected), list(arrays)))
        return [checked_array("input", tensor, arrays[name], take) for name, tensor in expected.items()]

    def serve(self, arrays: Sequence[np.ndarray | DeviceArray]) -> Served:
        """Return the runs that serve arrays of these shapes. Raises InputError where there are none."""
        shapes = tuple([array.shape for array in arrays])
        served = self._exact.get(shapes) or self._sizes.serve(shapes)
        if served is None:
            raise InputError(why_unserved(self.name, self.programs, shapes))
        return served

    def program(self, shapes: Shapes) -> Program | None:
        """Return the program that serves inputs of these shapes, in the last of several runs; None if there is none."""
        if len(shapes) != len(self._names):
            return None
        served = self._exact.get(shapes) or self._sizes.serve(shapes)
        return None if served is None else served.last.program

    def serve_at_once(self, arrays: Sequence[np.ndarray | DeviceArray]) -> Program:
        """Return the program that serves these arrays in one run. Raises InputError for shapes without one."""
        served = self.serve(arrays)
        if served.count > 1:
            why = why_unserved(self.name, self.programs, tuple([array.shape for array in arrays]))
            raise InputError(f"{why}; a call would be {served.count} runs")
        return served.last.program

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes(self.programs)


class Entries(dict[str | None, Signature]):
    """The signatures of a plan's entries by name; None is the only one, or else "main".

    Looking up an unknown name raises InputError.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__((name, Signature(name, programs)) for name, programs in plan.entries.items())
        self.names = tuple(plan.entries)
        default = self.names[0] if len(self.names) == 1 else "main"
        if default in self:
            self[None] = self[default]

    def __missing__(self, name: str | None) -> Signature:
        if name is None:
            example = f"entry({self.names[0]!r})"
            raise InputError(f"no entry is named, the plan has {list(self.names)}: name one, as in {example}")
        raise InputError(f"entry {name!r}: not found, the plan has {list(self.names)}")


class Entry:
    """One entry of a context; ``programs`` are those of its profiles."""

    def __init__(
        self,
        signature: Signature,
        call: Callable[[Sequence[Any], Mapping[str, Any]], np.ndarray | tuple[np.ndarray, ...]],
        run: Callable[[Mapping[str, Any]], dict[str, np.ndarray]],
    ) -> None:
        self.name = signature.name
        self.programs = signature.programs
        self._call = call
        self._run = run

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of its first program."""
        return self.programs[0].inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of its first program."""
        return self.programs[0].outputs

    def __repr__(self) -> str:
        return f"Entry({self.name!r}, {len(self.programs)} programs)"

    def __call__(self, /, *args: Any, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """Call the context with this entry's name."""
        return self._call(args, kwargs)

    def run(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run this entry; see `Context.run`."""
        return self._run(arrays)


_RUN_OPTIONS = frozenset({"out", "reuse_outputs", "stream"})
"""Options of `Context.run`. Keywords of a call are inputs, which may have these names."""


def _wrong_names(expected: list[str], given: list[str]) -> str:
    if unknown := [name for name in given if name not in expected]:
        hint = f"; {unknown[0]}= is an option of run({{name: array}})" if unknown[0] in _RUN_OPTIONS else ""
        return f"input {unknown[0]!r} is not one of the plan's inputs {expected}{hint}"
    missing = next(name for name in expected if name not in given)
    return f"input {missing!r} is missing: the plan takes {expected}"


def checked_array(side: str, tensor: Tensor, value: Any, take: Take) -> np.ndarray | DeviceArray:
    """Return the caller's array for a tensor, of the tensor's dtype; ``take`` is for arrays on a GPU.

    Raises InputError for any other dtype, for what is no array, and for a number that is to be bound or written.
    """
    array: np.ndarray | DeviceArray
    if type(value) is np.ndarray:
        array = value
    elif isinstance(value, np.ma.MaskedArray):
        raise InputError(
            f"{side} {tensor.name!r}: plans have no masks: fill in the masked values, .filled(0)"
        )
    elif isinstance(value, np.generic) and side in {"bind", "out"}:
        raise InputError(
            f"{side} {tensor.name!r}: got {value.dtype}, a number without memory of its own, expected an array"
        )
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    elif isinstance(value, type):  # torch.Tensor has the methods of an array, too
        raise InputError(f"{side} {tensor.name!r}: got the class {value.__name__}, expected an array")
    else:
        array = _taken(f"{side} {tensor.name!r}", tensor, value, take)
    expected = tensor.dtype if isinstance(array, DeviceArray) else numpy_dtype(tensor.dtype)
    if array.dtype != expected:
        mended = "give an array of that dtype" if side in {"out", "bind"} else f"use .astype({tensor.dtype!r})"
        raise InputError(f"{side} {tensor.name!r}: dtype {array.dtype}, expected {tensor.dtype}: {mended}")
    nbytes = ITEM_NBYTES[tensor.dtype]
    if isinstance(array, DeviceArray) and array.address % nbytes:  # a kernel that read there would end the use of CUDA
        raise InputError(
            f"{side} {tensor.name!r}: address {array.address:#x}, expected a multiple of {nbytes}, the bytes of an "
            "element: give a copy"
        )
    return array


def array_of_shape(side: str, tensor: Tensor, value: Any, take: Take) -> np.ndarray | DeviceArray:
    """Return what `checked_array` returns. Raises InputError for any other shape than the tensor's, too."""
    array = checked_array(side, tensor, value, take)
    if tuple(array.shape) != tensor.shape:
        raise InputError(f"{side} {tensor.name!r}: shape {tuple(array.shape)}, expected {tensor.shape}")
    return array


def _taken(where: str, tensor: Tensor, value: Any, take: Take) -> np.ndarray | DeviceArray:
    if device_arrays.is_negated(value):
        raise InputError(f"{where}: it is a negated view: give what .resolve_neg() returns")
    try:
        found = device_arrays.at_once(value)
        place = device_arrays.place(value if found is None else found)
        if place is not None:
            kind, ordinal = place
            return take(found or value, ordinal) if kind == "cuda" else device_arrays.from_host(value)
    except InputError as exc:
        raise InputError(f"{where}: {exc}") from exc
    raise InputError(
        f"{where}: got {type(value).__name__}, expected a numpy array: use numpy.asarray(value, {tensor.dtype!r})"
    )
