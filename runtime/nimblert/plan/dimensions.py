"""The named dimensions of an entry, whose programs differ in the sizes of these alone."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

from nimblert.plan import Profile, Program, Tensor

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[Shape, ...]


class Axes:
    """The named dimension of each axis of an entry's ``inputs`` and ``outputs``; None for an axis without one.

    ``bound`` holds the dimensions on which the size of some axis depends in another way, such as twice theirs.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self._profiles = [dict(program.profile) for program in programs]
        self.bound: set[str] = set()
        self.inputs = self._sides([program.inputs for program in programs])
        self.outputs = self._sides([program.outputs for program in programs])

    def sizes(self, shapes: Sequence[Shape]) -> dict[str, int] | None:
        """Return the sizes of the dimensions, given the shapes of the inputs; None where these contradict."""
        sizes: dict[str, int] = {}
        for shape, axes in zip(shapes, self.inputs, strict=True):
            if len(shape) != len(axes):
                return None
            for size, name in zip(shape, axes, strict=True):
                if name is not None and sizes.setdefault(name, size) != size:
                    return None
        return sizes

    def of_inputs(self, program: Program) -> "zip[tuple[Tensor, tuple[str | None, ...]]]":
        """Return each input of a program with the dimensions of its axes."""
        return zip(program.inputs, self.inputs, strict=True)

    def of_outputs(self, program: Program) -> "zip[tuple[Tensor, tuple[str | None, ...]]]":
        """Return each output of a program with the dimensions of its axes."""
        return zip(program.outputs, self.outputs, strict=True)

    def _sides(self, sides: Sequence[Sequence[Tensor]]) -> tuple[tuple[str | None, ...], ...]:
        shapes = (zip(*(tensor.shape for tensor in same), strict=True) for same in zip(*sides, strict=True))
        return tuple(tuple(map(self._dimension, axes)) for axes in shapes)

    def _dimension(self, sizes: Shape) -> str | None:
        """Return the dimension of an axis with this size in each program."""
        if len(set(sizes)) == 1:
            return None
        names = list(self._profiles[0])
        matching = [n for n in names if all(p[n] == size for p, size in zip(self._profiles, sizes, strict=True))]
        if len(matching) == 1:
            return matching[0]
        self.bound.update(self._causes(sizes) or names)
        return None

    def _causes(self, sizes: Shape) -> set[str]:
        """Return the dimensions whose change alone changes the size of this axis."""
        causes = set()
        for name, groups in self._alike.items():
            seen: dict[int, int] = {}
            if any(seen.setdefault(group, size) != size for group, size in zip(groups, sizes, strict=True)):
                causes.add(name)
        return causes

    @cached_property
    def _alike(self) -> dict[str, list[int]]:
        """By dimension the group of each program: those of a group differ in this dimension alone."""
        alike = {}
        for name in self._profiles[0]:
            groups: dict[frozenset[tuple[str, int]], int] = {}
            others = (frozenset(profile.items() - {(name, profile[name])}) for profile in self._profiles)
            alike[name] = [groups.setdefault(other, len(groups)) for other in others]
        return alike


def resized(tensor: Tensor, axes: Sequence[str | None], sizes: Mapping[str, int]) -> Shape:
    """Return the shape of a tensor whose axes have these dimensions, with new sizes for some of them."""
    return tuple(
        size if name is None else sizes.get(name, size) for size, name in zip(tensor.shape, axes, strict=True)
    )


def shapes_of(tensors: Iterable[Tensor]) -> Shapes:
    """Return the shape of each tensor."""
    return tuple(tensor.shape for tensor in tensors)


def profile_text(profile: Profile) -> str:
    """Return the sizes of a profile, as shown in messages."""
    return ", ".join(f"{name}={size}" for name, size in profile) or "none"
