"""The segments of a plan file: code and weights, behind the FlatBuffer.

The writer places them, and the reader checks their places.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nimblert.errors import PlanFormatError
from nimblert.plan import Plan, Target

ALIGNMENT = 4096
"""A page: segments can be mapped, and read with O_DIRECT, one by one."""

_MODEL_ALIGNMENT = 64
"""For ONNX models, which are small and many: with a page each, most of the file would be padding."""

TRAILER_NBYTES = 64
"""The trailer ends the file; see `nimblert.files.container`."""


class Segment(NamedTuple):
    """``nbytes`` bytes from ``offset`` of the file."""

    offset: int
    nbytes: int


def contents(plan: Plan) -> Iterator[memoryview]:
    """The bytes of each segment, in file order: modules, weights, state."""
    for module in plan.modules:
        yield module.code
    for weight in (*plan.weights, *plan.state):
        yield weight.data


def place(plan: Plan, start: int) -> tuple[Segment, ...]:
    """The places of `contents`, from byte ``start`` on.

    Cubins start on pages, ONNX models close together. The offset of a weight in the file equals that in its region
    modulo the page size, so that adjacent weights keep their distance and one copy can upload them all.
    """
    of_code = (0, _MODEL_ALIGNMENT if plan.target is Target.CPU else ALIGNMENT)
    places = [of_code] * len(plan.modules) + [(w.offset, ALIGNMENT) for w in (*plan.weights, *plan.state)]
    placed = []
    for (residue, alignment), data in zip(places, contents(plan), strict=True):
        offset = start + (residue - start) % alignment
        placed.append(Segment(offset, data.nbytes))
        start = offset + data.nbytes
    return tuple(placed)


def check(segments: Iterable[Segment], image: memoryview, start: int) -> None:
    """Raise PlanFormatError unless ``segments`` fill ``image`` from ``start`` to its end.

    They ascend without overlap, with less than a page of zeros between them. The last one ends the image: it is the
    trailer.
    """
    for segment in segments:
        if not start <= segment.offset < start + ALIGNMENT:
            raise PlanFormatError(
                f"segment at byte {segment.offset}: the one before it ends at byte {start},"
                f" expected less than {ALIGNMENT} bytes between"
            )
        if image[start : segment.offset] != bytes(segment.offset - start):
            raise PlanFormatError(f"bytes {start} to {segment.offset}: expected zero padding")
        start = segment.offset + segment.nbytes
        if start > len(image):
            raise PlanFormatError(f"segment at byte {segment.offset} ends at byte {start} of {len(image)}")
    if start != len(image):
        raise PlanFormatError(f"the last segment ends at byte {start} of {len(image)}")
