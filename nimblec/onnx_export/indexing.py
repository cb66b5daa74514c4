"""Reads of a part of a tensor, and writes to one.

torch.onnx reads a diagonal as a product with zeros, which is NaN beside infinity. It writes rows between two
transposes, copies of a whole cache, unless they are of the first dimension: here ScatterND indexes every dimension up
to theirs, and ONNX Runtime writes in place. It counts what a mask chooses, though a plan's sizes are fixed, and keeps
only the last of values that are scattered as a mean.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnx import numpy_helper
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

from nimblec.onnx_export.constants import described, ints, like, sizes, unsqueezed

aten = torch.ops.aten

_NEUTRAL: dict[str, Callable[[np.dtype[Any]], Any]] = {
    "sum": lambda _: 0,
    "mean": lambda _: 0,
    "prod": lambda _: 1,
    "amax": lambda dtype: np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf,
    "amin": lambda dtype: np.iinfo(dtype).max if dtype.kind in "iu" else np.inf,
}
"""Of each reduction, the number of a dtype that changes no result."""


def index(self: Any, indices: Sequence[Any]) -> Any:
    """Translate aten.index.Tensor."""
    return core.aten_index(self, [*map(_in_64_bits, indices)])


def index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Translate aten.index_put as a choice between two tensors where one value replaces all that a mask chooses."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) == 1 and given[0][1].dtype == onnx_ir.DataType.BOOL:
        ((dim, mask),) = given
        rank = len(mask.shape)
        behind = len(self.shape) - dim - rank
        value = _without_chosen(values, behind, rank)
        if value is not None:
            is_chosen = unsqueezed(mask, range(rank, rank + behind))
            return op.Where(is_chosen, op.Add(self, value) if accumulate else value, self)
    return core.aten_index_put(self, [*map(_in_64_bits, indices)], values, accumulate)


def _in_64_bits(index: Any) -> Any:
    """Return an index as GatherND and ScatterND take it."""
    if index is None or index.dtype != onnx_ir.DataType.INT32:
        return index
    wide: Any = op.Cast(index, to=onnx_ir.DataType.INT64)
    wide.shape, wide.dtype = index.shape, onnx_ir.DataType.INT64
    return wide


def _without_chosen(values: Any, behind: int, mask_rank: int) -> Any:
    """Return values for all that a mask could choose, with its axes; None where each chosen place has its own value.

    ``behind`` are the axes after those of the mask.
    """
    shape = list(values.shape)
    if len(shape) <= behind:
        return values
    *before, chosen = shape[: len(shape) - behind]
    after = shape[len(shape) - behind :]
    if chosen != 1 or not all(isinstance(size, int) for size in shape):
        return None
    return op.Reshape(values, ints([*before, *[1] * mask_rank, *after]))


def scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """Translate aten.scatter_reduce.two; without its own elements, it begins with the reduction's neutral element."""
    if not len(self.shape):
        axes = ints([0])
        self, index, src = (described(op.Unsqueeze(each, axes), [1], each) for each in (self, index, src))
        return op.Squeeze(scatter_reduce(self, 0, index, src, reduce, include_self), axes)
    rows = op.Shape(index)
    if not include_self:
        begin = op.Expand(like(_NEUTRAL[reduce](self.dtype.numpy()), self), rows)
        self = described(op.ScatterElements(self, index, begin, axis=dim), self.shape, self)
    if reduce != "mean":
        return core.aten_scatter_reduce(self, dim, index, src, reduce)
    one = like(1, self)
    own = op.Expand(like(int(include_self), self), op.Shape(self))
    counts = op.ScatterElements(own, index, op.Expand(one, rows), axis=dim, reduction="add")
    total = op.ScatterElements(self, index, src, axis=dim, reduction="add")
    total, counts = (described(each, self.shape, self) for each in (total, op.Max(counts, one)))
    return op.Div(total, counts) if self.dtype.is_floating_point() else core.aten_floor_divide(total, counts)


def scatter(self: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    """Translate aten.scatter.reduce, which reads as much of ``src`` as the index has places; and value_reduce."""
    if isinstance(src, int | float):
        src = described(op.Expand(like(src, self), op.Shape(index)), index.shape, self)
    elif (rank := len(index.shape)) > 0:
        src = described(op.Slice(src, ints([0] * rank), op.Shape(index), ints(range(rank))), index.shape, src)
    return scatter_reduce(self, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


def index_reduce(self: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    """Translate aten.index_reduce, in whose index each place stands for a row."""
    rank = max(len(source.shape), 1)
    dim %= rank
    places = op.Reshape(index, ints([*[1] * dim, -1, *[1] * (rank - 1 - dim)]))
    places = described(op.Expand(places, op.Shape(source)), source.shape, index)
    return scatter_reduce(self, dim, places, source, reduce, include_self)


def put(self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Translate aten.put, which writes into a tensor as if it were flat."""
    flat = ints([-1])
    places, values = (op.Reshape(each, flat) for each in (index, source))
    reduction = "add" if accumulate else "none"
    written = op.ScatterElements(op.Reshape(self, flat), places, values, axis=0, reduction=reduction)
    return op.Reshape(written, op.Shape(self))


def masked_scatter(self: Any, mask: Any, source: Any) -> Any:
    """Translate aten.masked_scatter: the n-th place that the mask chooses gets the n-th value."""
    flat, shape = ints([-1]), op.Shape(self)
    chosen: Any = op.Cast(op.Reshape(op.Expand(mask, shape), flat), to=onnx_ir.DataType.INT64)
    first: Any = op.Constant(value_int=0)
    numbers = op.Sub(op.CumSum(chosen, first), ints([1]))
    values = op.Reshape(op.Gather(op.Reshape(source, flat), numbers), shape)
    return op.Where(mask, values, self)


def diagonal(self: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Translate aten.diagonal by reading it alone: a product with a mask would make NaN of infinity beside it."""
    if not all(isinstance(size, int) for size in self.shape):
        return core.aten_diagonal(self, offset, dim1, dim2)
    places: Any = op.Constant(value=numpy_helper.from_array(_diagonal_places(sizes(self), offset, dim1, dim2)))
    return op.Gather(op.Reshape(self, ints([-1])), places)


def diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Translate aten.diagonal_scatter of a diagonal at known positions."""
    shape = sizes(self)
    places = _diagonal_places(shape, offset, dim1, dim2)
    flat = ints([-1])
    written = op.ScatterElements(op.Reshape(self, flat), ints(places.flatten().tolist()), op.Reshape(src, flat), axis=0)
    return op.Reshape(written, ints(shape))


def _diagonal_places(shape: Sequence[int], offset: int, dim1: int, dim2: int) -> np.ndarray:
    """Return, for each element of a diagonal, its number in the flattened tensor."""
    return np.arange(prod(shape)).reshape(shape).diagonal(offset, dim1, dim2).copy()


def index_copy(self: Any, dim: int, index: Any, source: Any) -> Any:
    """Translate aten.index_copy: rows of ``source`` to the positions ``index`` of a dimension."""
    dim %= max(len(self.shape), 1)
    return _write_rows(self, dim, index, source) if len(self.shape) else source


def index_put_rows(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Translate aten.index_put as `index_copy` where one dimension is indexed by a number or a list of them."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or accumulate or len(given[0][1].shape) > 1 or given[0][1].dtype != onnx_ir.DataType.INT64:
        return index_put(self, indices, values, accumulate)
    ((dim, index),) = given
    shape = sizes(self)
    rows = sizes(index)
    source = op.Expand(values, ints([*shape[:dim], *rows, *shape[dim + 1 :]]))
    if not rows:
        source = op.Unsqueeze(source, ints([dim]))
    return _write_rows(self, dim, index, source, count=prod(rows))


def select_scatter(self: Any, src: Any, dim: int, index: int) -> Any:
    """Translate aten.select_scatter of one row at a known position."""
    dim %= len(self.shape)
    return _write_rows(self, dim, ints([index]), op.Unsqueeze(src, ints([dim])), count=1)


def slice_scatter(
    self: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Translate aten.slice_scatter of rows at known positions; put the rest around rows that are most of the tensor."""
    shape = sizes(self)
    dim %= len(shape)
    positions = range(shape[dim])[slice(start, end, step)]
    src = op.Expand(src, ints([*shape[:dim], len(positions), *shape[dim + 1 :]]))
    if not positions:
        return op.Identity(self)
    if step != 1 or 2 * len(positions) < shape[dim]:
        return _write_rows(self, dim, ints(positions), src, count=len(positions))
    parts = [(0, positions[0]), (positions[-1] + 1, shape[dim])]
    before, after = ([op.Slice(self, ints([a]), ints([b]), ints([dim]))] if a < b else [] for a, b in parts)
    return op.Concat(*before, src, *after, axis=dim)


def _write_rows(self: Any, dim: int, positions: Any, source: Any, count: int | None = None) -> Any:
    """Write ``source``, a row for each of the positions, into a dimension of a tensor."""
    count = sizes(source)[dim] if count is None else count
    lead = (*sizes(self)[:dim], count)
    places = op.Expand(op.Reshape(positions, ints([*[1] * dim, count, 1])), ints([*lead, 1]))
    if dim:
        grid = np.moveaxis(np.indices(lead)[:dim], 0, -1).astype(np.int64)
        places = op.Concat(op.Constant(value=numpy_helper.from_array(grid)), places, axis=-1)
    return op.ScatterND(self, places, source)


INDEXING: dict[Any, Any] = {
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten.scatter_reduce.two: scatter_reduce,
    aten.scatter.reduce: scatter,
    aten.scatter.value_reduce: scatter,
    aten.index_reduce.default: index_reduce,
    aten.put.default: put,
    aten.masked_scatter.default: masked_scatter,
    aten.diagonal.default: diagonal,
    aten.diagonal_copy.default: diagonal,
    aten.diagonal_scatter.default: diagonal_scatter,
}
"""Translations for torch.onnx.export of any model."""

ROWS: dict[Any, Any] = {
    aten.index_copy.default: index_copy,
    aten.index_put.default: index_put_rows,
    aten.select_scatter.default: select_scatter,
    aten.slice_scatter.default: slice_scatter,
}
"""For models with state."""
