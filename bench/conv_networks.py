"""The convolutions and products of some networks, batch 1, for `bench.conv_kernels`.

Each network is a generator of its calls in order, with the operations that our kernel fuses into each launch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from nimblec.kernels.shapes import Convolution, product

Kind = Literal["convolution", "linear", "depthwise"]
Reading = Literal["", "relu", "norm relu", "gate"]
"""The operations that are fused into a call's reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call in a network; the library prepares the input of ``sharers`` calls once for all of them."""

    shape: Convolution
    activation: str
    residual: bool = False
    kind: Kind = "convolution"
    reading: Reading = ""
    sharers: int = 1

    def __str__(self) -> str:
        """Kernel, stride, rows by products by columns, and the fused operations."""
        s = self.shape
        before = f" after {self.reading}" if self.reading else ""
        kind = "linear" if self.kind == "linear" else f"{s.kernel[0]}x{s.kernel[1]}/{s.stride[0]}"
        if self.kind == "depthwise":
            return f"depthwise {kind} {s.out_height}x{s.out_width}x{s.channels} {self.activation}{before}"
        end = "+res" if self.residual else ""
        return f"{kind} {s.rows}x{s.depth}x{s.out_channels} {self.activation}{end}{before}"


def resnet50() -> Iterator[Call]:
    """Torchvision's, 224x224; the first block of a stage has a projection shortcut."""
    yield _image(224, 3, 64, kernel=7, stride=2, activation="relu")
    size, channels = 56, 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            yield _image(size, channels, width, activation="relu")
            yield _image(size, width, width, kernel=3, stride=stride, activation="relu")
            if not block:
                yield _image(size, channels, 4 * width, stride=stride, activation="none")
            size, channels = size // stride, 4 * width
            yield _image(size, width, channels, activation="relu", residual=True)
    yield Call(shape=product(1, 2048, 1000), activation="none", kind="linear")


def mobilenet_v2() -> Iterator[Call]:
    """Torchvision's, 224x224."""
    yield _image(224, 3, 32, kernel=3, stride=2, activation="relu6")
    yield _depthwise(112, 32)
    yield _image(112, 32, 16, activation="none")
    size, channels = 112, 16
    for width, depth, first in ((24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)):
        for block in range(depth):
            stride = 1 if block else first
            yield _image(size, channels, 6 * channels, activation="relu6")
            yield _depthwise(size, 6 * channels, stride=stride)
            size //= stride
            yield _image(size, 6 * channels, width, activation="none", residual=block > 0)
            channels = width
    yield _image(7, 320, 1280, activation="relu6")
    yield Call(shape=product(1, 1280, 1000), activation="none", kind="linear")


def bert() -> Iterator[Call]:
    """BERT-base, 128 tokens; queries, keys and values in one product."""
    yield from _transformer(128, 12, "gelu")


def gpt2() -> Iterator[Call]:
    """GPT-2, 64 tokens, with its last product over the vocabulary."""
    yield from _transformer(64, 12, "gelu_tanh")
    yield Call(shape=product(64, 768, 50257), activation="none", kind="linear")


def vit() -> Iterator[Call]:
    """ViT-B/16, 197 tokens."""
    yield from _transformer(197, 12, "gelu")


def _transformer(tokens: int, layers: int, activation: str) -> Iterator[Call]:
    for _ in range(layers):
        for depth, columns, then in ((768, 2304, ""), (768, 768, ""), (768, 3072, activation), (3072, 768, "")):
            yield Call(shape=product(tokens, depth, columns), activation=then or "none", kind="linear")


def mobilenet_v3() -> Iterator[Call]:
    """Torchvision's large one, 224x224."""
    yield _image(224, 3, 16, kernel=3, stride=2, activation="hardswish")
    size, channels = 112, 16
    for kernel, wide, width, excited, activation, stride in (
        (3, 16, 16, False, "relu", 1), (3, 64, 24, False, "relu", 2), (3, 72, 24, False, "relu", 1),
        (5, 72, 40, True, "relu", 2), (5, 120, 40, True, "relu", 1), (5, 120, 40, True, "relu", 1),
        (3, 240, 80, False, "hardswish", 2), (3, 200, 80, False, "hardswish", 1), (3, 184, 80, False, "hardswish", 1),
        (3, 184, 80, False, "hardswish", 1), (3, 480, 112, True, "hardswish", 1), (3, 672, 112, True, "hardswish", 1),
        (5, 672, 160, True, "hardswish", 2), (5, 960, 160, True, "hardswish", 1), (5, 960, 160, True, "hardswish", 1),
    ):  # fmt: skip
        squeezed = (wide // 4 + 7) // 8 * 8 if excited else 0
        yield from _bottleneck(size, channels, wide, width, kernel, stride, squeezed, activation, "hardsigmoid")
        size, channels = size // stride, width
    yield _image(7, 160, 960, activation="hardswish")
    yield Call(shape=product(1, 960, 1280), activation="hardswish", kind="linear")
    yield Call(shape=product(1, 1280, 1000), activation="none", kind="linear")


def efficientnet_b0() -> Iterator[Call]:
    """Torchvision's, 224x224."""
    yield _image(224, 3, 32, kernel=3, stride=2, activation="silu")
    size, channels = 112, 32
    for kernel, ratio, width, depth, first in (
        (3, 1, 16, 1, 1), (3, 6, 24, 2, 2), (5, 6, 40, 2, 2), (3, 6, 80, 3, 2), (5, 6, 112, 3, 1), (5, 6, 192, 4, 2),
        (3, 6, 320, 1, 1),
    ):  # fmt: skip
        for block in range(depth):
            stride = 1 if block else first
            yield from _bottleneck(
                size, channels, ratio * channels, width, kernel, stride, max(1, channels // 4), "silu", "sigmoid"
            )
            size, channels = size // stride, width
    yield _image(7, 320, 1280, activation="silu")
    yield Call(shape=product(1, 1280, 1000), activation="none", kind="linear")


def densenet121() -> Iterator[Call]:
    """Torchvision's, 224x224."""
    yield _image(224, 3, 64, kernel=7, stride=2, activation="relu")
    size, channels = 56, 64
    for depth in (6, 12, 24, 16):
        for _ in range(depth):
            yield replace(_image(size, channels, 128, activation="relu"), reading="norm relu")
            yield _image(size, 128, 32, kernel=3, activation="none")
            channels += 32
        if size > 7:
            yield replace(_image(size, channels, channels // 2, activation="none"), reading="norm relu")
            size, channels = size // 2, channels // 2
    yield Call(shape=product(1, 1024, 1000), activation="none", kind="linear")


def nasnet_cell() -> Iterator[Call]:
    """A normal cell of NASNet-A large in its second part: 21x21, 336 channels (Zoph et al. 2018)."""
    size, channels = 21, 336
    for _ in range(2):
        yield replace(_image(size, 6 * channels, channels, activation="none"), reading="relu", sharers=2)
    for kernel, sharers in ((5, 2), (3, 3), (5, 3), (3, 3), (3, 2)):
        first = replace(_image(size, channels, channels, kernel=kernel, activation="none"), kind="depthwise")
        yield replace(first, reading="relu", sharers=sharers)
        yield _image(size, channels, channels, activation="relu")
        yield first
        yield _image(size, channels, channels, activation="none", residual=True)


def _depthwise(size: int, channels: int, *, stride: int = 1) -> Call:
    call = _image(size, channels, channels, kernel=3, stride=stride, activation="relu6")
    return replace(call, kind="depthwise")


def _bottleneck(
    size: int,
    channels: int,
    wide: int,
    width: int,
    kernel: int,
    stride: int,
    squeezed: int,
    activation: str,
    gate: str,
) -> Iterator[Call]:
    """Widen, convolve each channel, apply squeeze-and-excitation if ``squeezed`` is not 0, narrow."""
    if wide != channels:
        yield _image(size, channels, wide, activation=activation)
    call = _image(size, wide, wide, kernel=kernel, stride=stride, activation=activation)
    yield replace(call, kind="depthwise")
    if squeezed:
        inner = "silu" if activation == "silu" else "relu"
        yield Call(shape=product(1, wide, squeezed), activation=inner, kind="linear")
        yield Call(shape=product(1, squeezed, wide), activation=gate, kind="linear")
    last = _image(size // stride, wide, width, activation="none", residual=stride == 1 and channels == width)
    yield replace(last, reading="gate") if squeezed else last


def _image(
    size: int,
    channels: int,
    out_channels: int,
    *,
    kernel: int = 1,
    stride: int = 1,
    activation: str,
    residual: bool = False,
) -> Call:
    shape = Convolution(
        batch=1,
        height=size,
        width=size,
        channels=channels,
        out_channels=out_channels,
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=(kernel // 2, kernel // 2),
    )
    return Call(shape=shape, activation=activation, residual=residual)


MODELS: dict[str, tuple[Callable[[], Iterator[Call]], torch.dtype]] = {
    "resnet50": (resnet50, torch.float16),
    "mobilenet_v2": (mobilenet_v2, torch.float16),
    "mobilenet_v3": (mobilenet_v3, torch.float16),
    "efficientnet_b0": (efficientnet_b0, torch.float16),
    "densenet121": (densenet121, torch.float16),
    "nasnet_cell": (nasnet_cell, torch.float16),
    "bert": (bert, torch.float16),
    "gpt2": (gpt2, torch.bfloat16),
    "vit": (vit, torch.float16),
}
