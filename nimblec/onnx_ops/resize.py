"""Resize and Upsample: one matrix of weights for each axis, made at import.

Every mode of ONNX is linear in the values and separable by axis: nearest has one 1 a row, linear
and cubic their kernels, with or without antialiasing.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nimblec.onnx_ops.axes import along, axes_of, sizes_of
from nimblec.onnx_ops.creation import convert
from nimblec.onnx_ops.table import Floats, Ints, Refused, op
from nimblec.onnx_ops.unsigned import index_select

COORDINATE_MODES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
    "tf_half_pixel_for_nn",
)


class Axis:
    """The resizing of one axis: from ``length`` to ``wanted`` elements by ``scale``."""

    def __init__(self, length: int, wanted: int, scale: float, roi: tuple[float, float]) -> None:
        self.length, self.wanted, self.scale, self.roi = length, wanted, scale, roi

    def positions(self, mode: str, dtype: type[np.floating]) -> np.ndarray:
        """Return the position in the input of each element of the output, computed in ``dtype``."""
        x = np.arange(self.wanted, dtype=dtype)
        n, m, s = self.length, self.wanted, dtype(self.scale)
        start, end = self.roi
        match mode:
            case "asymmetric":
                position = x / s
            case "align_corners":
                position = x * (n - 1) / (s * n - 1) if m > 1 else np.zeros(m)
            case "pytorch_half_pixel":
                position = (x + 0.5) / s - 0.5 if m > 1 else np.zeros(m)
            case "tf_half_pixel_for_nn":
                position = (x + 0.5) / s
            case "tf_crop_and_resize" if m > 1:
                position = start * (n - 1) + x * (end - start) * (n - 1) / (m - 1)
            case "tf_crop_and_resize":
                position = np.full(m, 0.5 * (start + end) * (n - 1))
            case "half_pixel_symmetric":
                # The centres of input and output coincide, also where scale * n is no whole number.
                position = n / 2 * (1 - m / (s * n)) + (x + 0.5) / s - 0.5
            case _:
                position = (x + 0.5) / s - 0.5
        return position


def _nearest(axis: Axis, position: np.ndarray, nearest_mode: str | None) -> np.ndarray:
    if nearest_mode is None:  # opset 10 has no attribute for it; its backend cases round up where they shrink
        nearest_mode = "ceil" if axis.scale < 1 else "floor"
    if nearest_mode == "round_prefer_floor":
        return np.ceil(position - 0.5)
    if nearest_mode == "round_prefer_ceil":
        return np.floor(position + 0.5)
    if nearest_mode == "floor":
        return np.floor(position)
    if nearest_mode == "ceil":
        return np.ceil(position)
    raise Refused(f"attribute 'nearest_mode' is {nearest_mode!r}")


def _linear_kernel(distance: np.ndarray, _: float) -> np.ndarray:
    return np.clip(1 - np.abs(distance), 0, None)


def _cubic_kernel(distance: np.ndarray, a: float) -> np.ndarray:
    """Return the kernel of Keys, "Cubic convolution interpolation for digital image processing" (1981)."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _weights(
    axis: Axis, position: np.ndarray, mode: str, cubic: float, antialias: int, exclude_outside: int
) -> np.ndarray:
    """Return the matrix (wanted, length) that maps the input's elements to the output's."""
    kernel, reach = (_linear_kernel, 1) if mode == "linear" else (_cubic_kernel, 2)
    shrink = min(1.0, axis.scale) if antialias else 1.0
    support = math.ceil(reach / shrink)
    base = np.floor(position).astype(np.int64)
    taps = base[:, None] + np.arange(-support, support + 2)[None, :]
    value = kernel((taps - position[:, None]) * shrink, cubic)
    outside = (taps < 0) | (taps >= axis.length)
    if exclude_outside or antialias:
        value = np.where(outside & bool(exclude_outside), 0.0, value)
        value = value / value.sum(1, keepdims=True)
    matrix = np.zeros((axis.wanted, axis.length))
    rows = np.broadcast_to(np.arange(axis.wanted)[:, None], taps.shape)
    np.add.at(matrix, (rows, np.clip(taps, 0, axis.length - 1)), value)
    return matrix


def resized(
    x: Tensor,
    axes: Sequence[Axis],
    mode: str,
    coordinate_mode: str,
    nearest_mode: str | None,
    cubic: float,
    antialias: int,
    exclude_outside: int,
    extrapolation_value: float,
) -> Tensor:
    """Resize every axis of ``x`` by the rule of ``mode``."""
    if mode not in ("nearest", "linear", "cubic") or coordinate_mode not in COORDINATE_MODES:
        raise Refused(f"mode {mode!r} with coordinates {coordinate_mode!r} is not supported")
    for i, axis in enumerate(axes):
        if axis.length == axis.wanted and axis.scale == 1 and coordinate_mode != "tf_crop_and_resize":
            continue
        if axis.length == 0:
            raise Refused(f"axis {i} is empty")
        # In float32, the dtype of scales, 3 / 0.6 is 5; in float64, 3 / float32(0.6) is less.
        position = axis.positions(coordinate_mode, np.float32 if mode == "nearest" else np.float64)
        if mode == "nearest":
            index = np.clip(_nearest(axis, position, nearest_mode), 0, axis.length - 1).astype(np.int64)
            x = index_select(x, i, torch.from_numpy(index))
        else:
            x = _apply(x, i, _weights(axis, position, mode, cubic, antialias, exclude_outside))
        if coordinate_mode == "tf_crop_and_resize":
            outside = torch.from_numpy((position < 0) | (position > axis.length - 1))
            x = torch.where(along(outside, i, x.dim()), torch.tensor(extrapolation_value, dtype=x.dtype), x)
    return x


def _apply(x: Tensor, axis: int, matrix: np.ndarray) -> Tensor:
    """Multiply one axis by a matrix, in single precision at least."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = torch.from_numpy(matrix).to(work)
    moved = x.to(work).movedim(axis, -1)
    y = torch.matmul(moved, weights.t()).movedim(-1, axis)
    if x.dtype.is_floating_point:
        return y.to(x.dtype)
    limits = torch.iinfo(x.dtype)  # cubic weights reach beyond the values
    return convert(torch.clamp(torch.round(y), limits.min, limits.max), x.dtype)


def _axes_by_scale(shape: Sequence[int], scales: Floats, roi: Floats | None) -> list[Axis]:
    if len(scales) != len(shape) or any(scale <= 0 for scale in scales):
        raise Refused(f"scales {scales} do not fit {len(shape)} dimensions")
    sizes_of(int(length * scale) for length, scale in zip(shape, scales, strict=True))
    return [
        Axis(length, math.floor(np.float32(length) * np.float32(scale)), scale, _region(roi, i, len(shape)))
        for i, (length, scale) in enumerate(zip(shape, scales, strict=True))
    ]


def _region(roi: Floats | None, i: int, rank: int) -> tuple[float, float]:
    return (0.0, 1.0) if not roi else (roi[i], roi[rank + i])


@op("Upsample", since=7)
def upsample_attribute(x: Tensor, *, mode: str = "nearest", scales: Floats) -> Tensor:
    return upsample(x, scales, mode=mode)


@op("Upsample", since=9)
@op("Resize", since=10)
def upsample(x: Tensor, scales: Floats, *, mode: str = "nearest") -> Tensor:
    whole = all(float(scale).is_integer() for scale in scales)
    images = x.dim() == 4 and x.dtype.is_floating_point
    if mode == "nearest" and images and whole and scales[:2] == (1.0, 1.0):
        sizes = sizes_of(length * int(scale) for length, scale in zip(x.shape, scales, strict=True))
        return torch.ops.aten.upsample_nearest2d(x, list(sizes[2:]))
    return resized(x, _axes_by_scale(x.shape, scales, None), mode, "asymmetric", None, -0.75, 0, 0, 0.0)


@op("Resize", since=11)
def resize(
    x: Tensor,
    roi: Floats | None = None,
    scales: Floats | None = None,
    sizes: Ints | None = None,
    *,
    antialias: int = 0,
    axes: Ints | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    chosen = axes_of(range(x.dim()) if axes is None else axes, x.dim())
    if bool(scales) == bool(sizes):
        raise Refused("needs either input 2 'scales' or input 3 'sizes'")
    plan = {i: Axis(length, length, 1.0, (0.0, 1.0)) for i, length in enumerate(x.shape)}
    lengths = [x.shape[i] for i in chosen]
    if scales:
        new = _axes_by_scale(lengths, scales, roi)
    else:
        new = _axes_by_size(lengths, sizes or (), roi, keep_aspect_ratio_policy)
    plan.update(zip(chosen, new, strict=True))
    return resized(
        x,
        [plan[i] for i in range(x.dim())],
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        antialias,
        exclude_outside,
        extrapolation_value,
    )


def _axes_by_size(shape: Sequence[int], sizes: Ints, roi: Floats | None, policy: str) -> list[Axis]:
    if len(sizes) != len(shape) or 0 in shape:
        raise Refused(f"sizes {sizes} do not fit shape {tuple(shape)}")
    scales = [size / length for size, length in zip(sizes_of(sizes), shape, strict=True)]
    if policy in ("not_larger", "not_smaller"):
        scale = min(scales) if policy == "not_larger" else max(scales)
        scales = [scale] * len(shape)
        sizes = tuple(math.floor(scale * length + 0.5) for length in shape)
    elif policy != "stretch":
        raise Refused(f"attribute 'keep_aspect_ratio_policy' is {policy!r}")
    return [
        Axis(length, size, scale, _region(roi, i, len(shape)))
        for i, (length, size, scale) in enumerate(zip(shape, sizes, scales, strict=True))
    ]
