"""Arrays of a smaller shape on a GPU: copied to the start of an input along each axis, and the rest is filled."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from nimblert.arrays import layouts, padding
from nimblert.arrays.dtypes import numpy_dtype
from nimblert.cuda import graph
from nimblert.cuda.driver import Handle, call
from nimblert.cuda.graph import Filling, Step
from nimblert.cuda.movers import GatherKernels, Mover, RowMover
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Tensor

_WORD_NBYTES = 4
"""The largest element of a fill."""


class PaddingMover(Mover):
    """Copies arrays of a ``shape`` with these ``strides``, in elements, to the start of an input, and fills the rest.

    The program, or calls of other sizes, may have written the rest since the last call, so that each fills it again.
    ``landing`` gives device memory of the input's size. Raises InputError where no kernel can lay out such an array.
    """

    def __init__(
        self,
        kernels: GatherKernels,
        tensor: Tensor,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        landing: Callable[[], int],
    ) -> None:
        self._parts: list[Mover] = list(_fills(tensor, shape))
        itemsize = ITEM_NBYTES[tensor.dtype]
        whole = layouts.gather(shape, tensor.strides, strides)
        if whole is not None:
            self._parts.append(kernels.mover(whole, itemsize))
            return
        dense = layouts.dense_like(shape, tensor.strides)
        gather = layouts.gather(shape, dense, strides)
        if gather is None:
            raise InputError(f"input {tensor.name!r}: strides {strides} cannot be laid out on the device")
        rows = RowMover(shape, tensor.strides, dense, itemsize)
        if gather.is_copy:
            self._parts.append(rows)
        else:
            landed = landing()
            self._parts += [_Redirected(kernels.mover(gather, itemsize), to=landed), _Redirected(rows, source=landed)]

    def move(self, to: int, source: int, stream: Handle) -> None:
        """As `Mover.move`."""
        for part in self._parts:
            part.move(to, source, stream)

    def steps(self, to: int, source: int) -> list[Step]:
        """As `Mover.steps`."""
        return [step for part in self._parts for step in part.steps(to, source)]


class _Redirected(Mover):
    """A mover to or from a fixed address."""

    def __init__(self, mover: Mover, *, to: int | None = None, source: int | None = None) -> None:
        self._mover, self._to, self._source = mover, to, source

    def _ends(self, to: int, source: int) -> tuple[int, int]:
        return to if self._to is None else self._to, source if self._source is None else self._source

    def move(self, to: int, source: int, stream: Handle) -> None:
        self._mover.move(*self._ends(to, source), stream)

    def steps(self, to: int, source: int) -> list[Step]:
        return self._mover.steps(*self._ends(to, source))


@dataclass(frozen=True, slots=True)
class _Fill(Mover):
    """Fills memory ``offset`` bytes after the destination; there is no source."""

    offset: int
    filling: Filling

    def move(self, to: int, source: int, stream: Handle) -> None:
        del source
        value, itemsize, width, height, pitch = self.filling
        call(f"cuMemsetD2D{8 * itemsize}Async", to + self.offset, pitch, value, width, height, stream)

    def steps(self, to: int, source: int) -> list[Step]:
        del source
        return [partial(graph.add_fill, dst=to + self.offset, filling=self.filling)]


def _fills(tensor: Tensor, shape: Sequence[int]) -> Iterator[_Fill]:
    """Fills of at least the elements of an input beyond ``shape`` with its padding value."""
    itemsize = ITEM_NBYTES[tensor.dtype]
    words = _words(padding.filling(tensor), tensor)
    size = min(itemsize, _WORD_NBYTES)
    if len(set(words)) > 1:  # a row for each word of an element
        count = tensor.span_nbytes // itemsize
        for position, word in enumerate(words):
            yield _Fill(position * size, Filling(word, size, 1, count, itemsize))
    elif not layouts.is_dense(tensor.shape, tensor.strides):
        yield _Fill(0, Filling(words[0], size, tensor.span_nbytes // size))
    else:
        for given, whole, stride in zip(shape, tensor.shape, tensor.strides, strict=True):
            if given < whole:
                start, width, pitch = given * stride, (whole - given) * stride, whole * stride
                height = prod(tensor.shape) // pitch
                yield _Fill(start * itemsize, Filling(words[0], size, width * len(words), height, pitch * itemsize))


def _words(value: int, tensor: Tensor) -> list[int]:
    """The bits of an element of this value, in words of at most 4 bytes."""
    itemsize = ITEM_NBYTES[tensor.dtype]
    if not value:  # also of bfloat16, which numpy lacks
        return [0] * -(-itemsize // _WORD_NBYTES)
    element = np.array(value, numpy_dtype(tensor.dtype)).reshape(1)
    words: list[int] = element.view(f"u{min(itemsize, _WORD_NBYTES)}").tolist()
    return words
