"""Grouped convolutions by cuDNN in both memory layouts: the basis of `nimblec.optimize.passes.layout_groups`.

``python -m bench.grouped_convolutions`` on a GPU prints a line for each case: microseconds of one call in a graph of
ten, contiguous (nchw), channels last (nhwc), contiguous with copies from and to channels last (copied), and of
cuDNN's call with bias and ReLU in both layouts (-1: not supported).
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from bench.environment import describe
from nimblec.kernels.gpu import GPU
from nimblec.kernels.timing import GraphTimer

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A convolution of one image of ``size`` x ``size`` pixels."""

    channels: int
    results: int
    size: int
    kernel: int
    groups: int
    stride: int = 1
    dilation: int = 1


def _depthwise(channels: int, size: int, kernel: int, *, stride: int = 1, dilation: int = 1, results: int = 1) -> Case:
    return Case(
        channels=channels,
        results=channels * results,
        size=size,
        kernel=kernel,
        groups=channels,
        stride=stride,
        dilation=dilation,
    )


def _grouped(read: int, made: int, *, kernel: int = 3, groups: int | None = None) -> Case:
    groups = groups or max(2, 128 // read)
    return Case(channels=read * groups, results=made * groups, size=28, kernel=kernel, groups=groups)


CASES = (
    *(_depthwise(96, 56, kernel) for kernel in (1, 3, 7, 9, 11, 13, 15, 21, 31)),
    *(_depthwise(384, 14, kernel) for kernel in (7, 9, 11, 13, 15, 21)),
    *(_depthwise(96, 56, kernel, dilation=dilation) for kernel, dilation in ((3, 2), (5, 2), (7, 3))),
    *(_depthwise(96, 56, kernel, stride=2) for kernel in (3, 5, 7)),
    *(_depthwise(96, 32, kernel, stride=2, results=2) for kernel in (3, 7)),
    *(_depthwise(64, 28, kernel, results=results) for kernel, results in ((1, 2), (3, 2), (3, 4), (3, 8))),
    *(_grouped(read, made) for read, made in ((2, 1), (2, 2), (2, 4), (3, 3), (4, 2), (4, 4), (4, 8), (5, 5), (6, 6))),
    *(_grouped(width, width) for width in (8, 10, 16, 24, 30, 32)),
    *(_grouped(width, width, kernel=1) for width in (2, 3, 4, 8, 16, 30)),
    *(_grouped(read, made, groups=2) for read, made in ((32, 64), (48, 48), (48, 128), (128, 128), (128, 256))),
)


def times(case: Case, dtype: torch.dtype, timer: GraphTimer) -> dict[str, float]:
    """Microseconds of each variant."""
    weight = torch.randn(case.results, case.channels // case.groups, case.kernel, case.kernel).to("cuda", dtype)
    x = torch.randn(1, case.channels, case.size, case.size).to("cuda", dtype)
    bias = torch.randn(case.results).to("cuda", dtype)
    padding = case.dilation * (case.kernel // 2)
    geometry = (case.stride, padding, case.dilation, case.groups)
    last = torch.channels_last
    x_last, weight_last = x.contiguous(memory_format=last), weight.contiguous(memory_format=last)

    def copied(_: int) -> Tensor:
        y = functional.conv2d(x_last.contiguous(), weight, None, *geometry)
        return y.contiguous(memory_format=last)

    def fused(images: Tensor, filters: Tensor) -> float:
        def call(_: int) -> Tensor:
            return torch.cudnn_convolution_relu(
                images, filters, bias, [case.stride] * 2, [padding] * 2, [case.dilation] * 2, case.groups
            )

        try:
            call(0)
        except RuntimeError:
            return -1
        return timer(call)

    calls: dict[str, Callable[[int], Tensor]] = {
        "nchw": lambda _: functional.conv2d(x, weight, None, *geometry),
        "nhwc": lambda _: functional.conv2d(x_last, weight_last, None, *geometry),
        "copied": copied,
    }
    found = {name: timer(call) for name, call in calls.items()}
    return found | {"nchw+relu": fused(x, weight), "nhwc+relu": fused(x_last, weight_last)}


def main() -> None:
    """Print the environment and the table."""
    print(json.dumps(describe()))
    timer = GraphTimer(GPU.current(), length=10, repeats=5)
    for dtype in (torch.float16, torch.float32):
        for case in CASES:
            found = {name: round(microseconds, 1) for name, microseconds in times(case, dtype, timer).items()}
            print(str(dtype).removeprefix("torch."), case, found, flush=True)


if __name__ == "__main__":
    main()
