"""Sampling of images at computed places."""

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from nimblec.onnx_ops.axes import repeated, sizes_of
from nimblec.onnx_ops.table import Ints, Refused, op

SAMPLE_MODES = {
    "linear": "bilinear",
    "bilinear": "bilinear",
    "nearest": "nearest",
    "cubic": "bicubic",
    "bicubic": "bicubic",
}


@op("GridSample", since=16)
def grid_sample_16(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Tensor:
    return grid_sample(x, grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@op("GridSample", since=20)
def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    if mode not in SAMPLE_MODES or padding_mode not in ("zeros", "border", "reflection"):
        raise Refused(f"mode {mode!r} with padding_mode {padding_mode!r} is not supported")
    if x.dim() not in (4, 5) or (x.dim() == 5 and SAMPLE_MODES[mode] == "bicubic"):
        raise Refused(f"mode {mode!r} for an input of {x.dim()} dimensions is not supported")
    return functional.grid_sample(x, grid.to(x.dtype), SAMPLE_MODES[mode], padding_mode, bool(align_corners))


@op("AffineGrid", since=20)
def affine_grid(theta: Tensor, size: Ints, *, align_corners: int = 0) -> Tensor:
    batch, _, *lengths = sizes_of(size)
    if len(lengths) not in (2, 3):
        raise Refused(f"a grid of {len(lengths)} axes is not supported; expected 2 or 3")
    places = torch.meshgrid(*(_places(length, aligned=bool(align_corners)) for length in lengths), indexing="ij")
    points = torch.stack([*reversed(places), torch.ones_like(places[0])], -1).reshape(-1, len(lengths) + 1)
    repeated_points = points.to(theta.dtype).expand(batch, -1, -1)
    return torch.bmm(repeated_points, theta.transpose(1, 2)).reshape(batch, *lengths, len(lengths))


def _places(length: int, *, aligned: bool) -> Tensor:
    """Return where the pixels of an axis lie between -1 and 1; a single aligned one is at 1, as in ONNX Runtime."""
    if aligned:
        return torch.linspace(1, -1, length, dtype=torch.float64).flip(0)
    return (2 * torch.arange(length, dtype=torch.float64) + 1) / length - 1


@op("RoiAlign", since=10)
def roi_align_10(
    x: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    return roi_align(
        x,
        rois,
        batch_indices,
        coordinate_transformation_mode="output_half_pixel",
        mode=mode,
        output_height=output_height,
        output_width=output_width,
        sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )


@op("RoiAlign", since=16)
def roi_align(
    x: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    if coordinate_transformation_mode not in ("half_pixel", "output_half_pixel") or mode not in ("avg", "max"):
        raise Refused(f"mode {mode!r} with {coordinate_transformation_mode!r} is not supported")
    half_pixel = coordinate_transformation_mode == "half_pixel"
    boxes = rois * spatial_scale - (0.5 if half_pixel else 0.0)
    sizes = boxes.narrow(1, 2, 2) - boxes.narrow(1, 0, 2)
    if not half_pixel:
        sizes = torch.clamp(sizes, min=1)
    bins = sizes / torch.tensor([output_width, output_height], dtype=x.dtype)
    grid = (output_height, output_width)
    if sampling_ratio > 0:
        return _pool_regions(x, boxes, bins, batch_indices, grid, (sampling_ratio, sampling_ratio), mode)
    if isinstance(bins, FakeTensor):
        raise Refused("sampling_ratio 0 needs input 1 'rois' to be known at import")
    pooled = [
        _pool_regions(
            x,
            boxes.narrow(0, i, 1),
            bins.narrow(0, i, 1),
            batch_indices.narrow(0, i, 1),
            grid,
            (max(0, math.ceil(float(height))), max(0, math.ceil(float(width)))),
            mode,
        )
        for i, (width, height) in enumerate(bins)
    ]
    return torch.cat(pooled) if pooled else torch.zeros((0, x.shape[1], *grid), dtype=x.dtype)


def _pool_regions(
    x: Tensor,
    boxes: Tensor,
    bins: Tensor,
    batch_indices: Tensor,
    grid: tuple[int, int],
    samples: tuple[int, int],
    mode: str,
) -> Tensor:
    """Pool ``samples`` points in each bin of each box: (boxes, channels, rows, columns)."""
    if 0 in samples:
        return torch.zeros((boxes.shape[0], x.shape[1], *grid), dtype=x.dtype)
    lines = []
    for axis, (count, each) in enumerate(zip(grid, samples, strict=True)):
        place = (torch.arange(count * each, dtype=x.dtype) + 0.5) / each
        lines.append(boxes.narrow(1, 1 - axis, 1) + place * bins.narrow(1, 1 - axis, 1))
    corners = _corners(x, batch_indices, *lines)
    shape = (boxes.shape[0], x.shape[1], grid[0], samples[0], grid[1], samples[1])
    if mode == "avg":
        return torch.mean(sum(corners[1:], corners[0]).reshape(shape), [3, 5])
    # As ONNX has it, the maximum is over the weighted corners and not over the interpolated points.
    return torch.amax(torch.stack(corners).reshape(4, *shape), [0, 4, 6])


def _corners(x: Tensor, batch_indices: Tensor, rows: Tensor, columns: Tensor) -> list[Tensor]:
    """Return the four weighted neighbours of each point: 4 of (boxes, channels, rows, columns)."""
    height, width = x.shape[2:]
    low_row, high_row, row_weights = _neighbours(rows, height)
    low_column, high_column, column_weights = _neighbours(columns, width)
    image = torch.index_select(x, 0, batch_indices.to(torch.int64)).reshape(rows.shape[0], x.shape[1], -1)
    found = []
    for row, row_weight in zip((low_row, high_row), row_weights, strict=True):
        for column, column_weight in zip((low_column, high_column), column_weights, strict=True):
            place = (row.unsqueeze(2) * width + column.unsqueeze(1)).reshape(rows.shape[0], 1, -1)
            value = torch.gather(image, 2, place.expand(-1, x.shape[1], -1))
            weight = (row_weight.unsqueeze(2) * column_weight.unsqueeze(1)).reshape(rows.shape[0], 1, -1)
            found.append((value * weight).reshape(*image.shape[:2], rows.shape[1], columns.shape[1]))
    return found


def _neighbours(place: Tensor, length: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return the elements below and above each place and their weights, 0 for places far outside."""
    inside = (place >= -1) & (place <= length)
    place = torch.clamp(place, 0, length - 1)
    low = torch.floor(place)
    fraction = place - low
    weights = ((1 - fraction) * inside, fraction * inside)
    high = torch.clamp(low + 1, max=length - 1)
    return low.to(torch.int64), high.to(torch.int64), weights


@op("DeformConv", since=19)
def deformable_convolution(
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    b: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    offset_group: int = 1,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    if x.dim() != 4 or kernel_shape not in (None, tuple(w.shape[2:])):
        raise Refused(f"input of {x.dim()} dimensions with kernel {kernel_shape}; expected 4 and {tuple(w.shape[2:])}")
    dilations, strides = repeated(dilations, 2, 1, "dilations"), repeated(strides, 2, 1, "strides")
    pads = repeated(pads, 4, 0, "pads")
    n, channels = x.shape[:2]
    (kernel_h, kernel_w), (out_h, out_w) = w.shape[2:], offset.shape[2:]
    taps = kernel_h * kernel_w
    shifts = offset.reshape(n * offset_group, taps, 2, out_h, out_w)
    places = []
    for axis, (count, out) in enumerate(((kernel_h, out_h), (kernel_w, out_w))):
        tap = torch.arange(count) * dilations[axis]
        start = torch.arange(out) * strides[axis] - pads[axis]
        tap = tap[:, None].expand(kernel_h, kernel_w) if axis == 0 else tap[None, :].expand(kernel_h, kernel_w)
        start = start[:, None] if axis == 0 else start[None, :]
        place = shifts.select(2, axis) + (tap.reshape(taps, 1, 1) + start).to(x.dtype)
        # grid_sample wants -1 and 1 at the edges of the image: at the centres, a single pixel would be everywhere.
        length = max(1, x.shape[2 + axis])
        places.append(place * (2 / length) + (1 / length - 1))
    grid = torch.stack((places[1], places[0]), -1).reshape(n * offset_group, taps * out_h, out_w, 2)
    images = x.reshape(n * offset_group, channels // offset_group, *x.shape[2:])
    columns = functional.grid_sample(images, grid, "bilinear", "zeros", align_corners=False)
    columns = columns.reshape(n, offset_group, channels // offset_group, taps, out_h, out_w)
    if mask is not None:
        columns = columns * mask.reshape(n, offset_group, 1, taps, out_h, out_w)
    columns = columns.reshape(n, group, w.shape[1] * taps, out_h * out_w)
    y = torch.matmul(w.reshape(group, w.shape[0] // group, -1), columns).reshape(n, w.shape[0], out_h, out_w)
    return y if b is None else y + b.reshape(-1, 1, 1)
