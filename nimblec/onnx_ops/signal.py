"""Fourier transforms and spectra, as products with matrices made at import."""

import math

import numpy as np
import torch
from torch import Tensor

from nimblec.onnx_ops.axes import axis_of, sizes_of
from nimblec.onnx_ops.creation import dtype_of
from nimblec.onnx_ops.table import Refused, op

LONGEST = 4096
"""Longest transform: its matrix has 2 * LONGEST**2 elements."""


def _transform_matrix(length: int, rows: int, bins: int, parts: int, *, inverse: bool) -> np.ndarray:
    """Return the matrix (rows * parts, bins * 2) of a DFT of ``rows`` of ``length`` samples.

    ``parts`` is 1 for real samples, 2 for pairs of real and imaginary part.
    """
    if not 0 < length <= LONGEST:
        raise Refused(f"transforms {length} samples; expected 1 to {LONGEST}")
    angle = np.outer(np.arange(rows), np.arange(bins)) % length * (2 * math.pi / length)
    cosine, sine = np.cos(angle), (np.sin(angle) if inverse else -np.sin(angle))
    matrix = np.empty((rows, parts, bins, 2))
    matrix[:, 0, :, 0], matrix[:, 0, :, 1] = cosine, sine
    if parts == 2:
        matrix[:, 1, :, 0], matrix[:, 1, :, 1] = -sine, cosine
    return matrix.reshape(rows * parts, bins * 2) / (length if inverse else 1)


def _real_inverse_matrix(length: int, rows: int) -> np.ndarray:
    """Return the matrix (rows * 2, length) from half a spectrum to a real signal."""
    if not 0 < length <= LONGEST:
        raise Refused(f"transforms {length} samples; expected 1 to {LONGEST}")
    angle = np.outer(np.arange(rows), np.arange(length)) % length * (2 * math.pi / length)
    weight = np.full((rows, 1), 2.0)
    weight[0] = 1
    if length % 2 == 0 and rows == length // 2 + 1:
        weight[-1] = 1
    matrix = np.stack((weight * np.cos(angle), -weight * np.sin(angle)), 1)
    return matrix.reshape(rows * 2, length) / length


def _multiply(x: Tensor, matrix: np.ndarray) -> Tensor:
    """Multiply the last two axes of ``x``, taken as one, by a matrix."""
    flat = x.reshape([-1, x.shape[-2] * x.shape[-1]])
    return torch.mm(flat, torch.from_numpy(matrix).to(x.dtype)).reshape([*x.shape[:-2], matrix.shape[1]])


@op("DFT", since=17)
def dft_17(
    input: Tensor, dft_length: int | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Tensor:
    return dft(input, dft_length, axis, inverse=inverse, onesided=onesided)


@op("DFT", since=20)
def dft(
    input: Tensor,
    dft_length: int | None = None,
    axis: int = -2,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    axis = axis_of(axis, input.dim())
    if axis == input.dim() - 1 or input.shape[-1] not in (1, 2):
        raise Refused(f"axis {axis} of shape {tuple(input.shape)}; expected another than the last, of length 1 or 2")
    x = input.movedim(axis, -2)
    halved = bool(inverse and onesided)
    length = dft_length or (2 * (x.shape[-2] - 1) if halved else x.shape[-2])
    used = min(x.shape[-2], length // 2 + 1 if halved else length)
    x = x.narrow(-2, 0, used)
    if halved:
        if x.shape[-1] != 2:
            raise Refused("a one-sided inverse transform of real values; expected complex ones")
        return _multiply(x, _real_inverse_matrix(length, x.shape[-2])).unsqueeze(-1).movedim(-2, axis)
    bins = length // 2 + 1 if onesided else length
    y = _multiply(x, _transform_matrix(length, x.shape[-2], bins, x.shape[-1], inverse=bool(inverse)))
    return y.reshape([*y.shape[:-1], bins, 2]).movedim(-2, axis)


@op("STFT", since=17)
def stft(
    signal: Tensor,
    frame_step: int,
    window: Tensor | None = None,
    frame_length: int | None = None,
    *,
    onesided: int = 1,
) -> Tensor:
    # torch.onnx's older exporter writes real samples without a last axis, and ONNX Runtime takes them.
    if signal.dim() == 2:
        signal = signal.unsqueeze(-1)
    length = frame_length
    if length is None:
        length = signal.shape[1] if window is None else window.shape[0]
    if frame_step < 1 or signal.dim() != 3 or not 0 < length <= signal.shape[1]:
        raise Refused(f"frames of {length} by {frame_step} do not fit a signal of shape {tuple(signal.shape)}")
    frames = signal.unfold(1, length, frame_step).transpose(2, 3)
    if window is not None:
        frames = frames * window.reshape(-1, 1)
    bins = length // 2 + 1 if onesided else length
    y = _multiply(frames, _transform_matrix(length, length, bins, signal.shape[2], inverse=False))
    return y.reshape([*y.shape[:-1], bins, 2])


@op("MelWeightMatrix", since=17)
def mel_weight_matrix(
    num_mel_bins: int,
    dft_length: int,
    sample_rate: int,
    lower_edge_hertz: float,
    upper_edge_hertz: float,
    *,
    output_datatype: int = 1,
) -> Tensor:
    rows, columns = sizes_of((dft_length // 2 + 1, num_mel_bins))
    low, high = (2595 * math.log10(1 + edge / 700) for edge in (lower_edge_hertz, upper_edge_hertz))
    mel = np.arange(num_mel_bins + 2) * (high - low) / (num_mel_bins + 2) + low
    edges = ((dft_length + 1) * (700 * (10 ** (mel / 2595) - 1)) // sample_rate).astype(int)
    if edges.min() < 0 or edges.max() > rows:
        raise Refused(f"edges {lower_edge_hertz} and {upper_edge_hertz} Hz lie outside the spectrum")
    weights = np.zeros((rows, columns))
    for i, (left, center, right) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        bins = np.arange(rows)
        rising = (bins >= left) & (bins <= center)
        weights[rising, i] = (bins[rising] - left) / (center - left) if center > left else 1.0
        falling = (bins >= center) & (bins < right)
        weights[falling, i] = (right - bins[falling]) / max(1, right - center)
    return torch.from_numpy(weights).to(dtype_of(output_datatype))
