"""A transformer's feed-forward block made only of our own Triton kernels.

Its plan has no code of other libraries, so it may be committed (tests/data/triton_block.plan).
"""
# ruff: noqa: ANN001, ANN201 - Triton gives a kernel's parameters their types at each launch

import torch
import triton
import triton.language as tl

ROWS, WIDTH, WIDE = 32, 64, 128
_TILE = 32
_BLOCK = 1024


@triton.jit
def triton_layer_norm(x, weight, bias, out, width: tl.constexpr, epsilon: tl.constexpr):
    """Normalise one row per program by its mean and variance, then scale and shift it."""
    columns = tl.arange(0, width)
    row = tl.program_id(0) * width + columns
    values = tl.load(x + row)
    centred = values - tl.sum(values, 0) / width
    variance = tl.sum(centred * centred, 0) / width
    scaled = centred / tl.sqrt(variance + epsilon) * tl.load(weight + columns) + tl.load(bias + columns)
    tl.store(out + row, scaled)


@triton.jit
def triton_matmul(a, b, out, width: tl.constexpr, depth: tl.constexpr, tile: tl.constexpr):
    """Multiply a tile of ``a`` (rows, depth) by one of ``b`` (depth, width) in each program."""
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    inner = tl.arange(0, tile)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(0, depth, tile):
        left = tl.load(a + rows[:, None] * depth + (start + inner)[None, :])
        right = tl.load(b + (start + inner)[:, None] * width + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * width + columns[None, :], total)


@triton.jit
def triton_gelu(x, out, count, block: tl.constexpr):
    """Apply the Gaussian error linear unit by its sigmoid approximation (Hendrycks and Gimpel, 2016)."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(x + at, mask=at < count)
    tl.store(out + at, values * tl.sigmoid(1.702 * values), mask=at < count)


@triton.jit
def triton_add(a, b, out, count, block: tl.constexpr):
    """Add element by element."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(a + at, mask=at < count) + tl.load(b + at, mask=at < count), mask=at < count)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Normalise each row of ``x`` (rows, width), contiguous; the width is a power of two."""
    out = torch.empty_like(x)
    triton_layer_norm[(x.shape[0],)](x, weight, bias, out, width=x.shape[1], epsilon=1e-5)
    return out


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of contiguous float32 matrices whose sizes are multiples of 32."""
    out = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    grid = (a.shape[0] // _TILE, b.shape[1] // _TILE)
    triton_matmul[grid](a, b, out, width=b.shape[1], depth=a.shape[1], tile=_TILE)
    return out


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the activation of a contiguous tensor of any size."""
    out = torch.empty_like(x)
    triton_gelu[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), block=_BLOCK)
    return out


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sum of two contiguous tensors of one shape."""
    out = torch.empty_like(a)
    triton_add[(triton.cdiv(a.numel(), _BLOCK),)](a, b, out, a.numel(), block=_BLOCK)
    return out


class TritonBlock(torch.nn.Module):
    """x + down(gelu(up(norm(x)))) of (32, 64) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = torch.nn.Parameter(torch.randn(WIDTH))
        self.up = torch.nn.Parameter(torch.randn(WIDTH, WIDE) / WIDTH**0.5)
        self.down = torch.nn.Parameter(torch.randn(WIDE, WIDTH) / WIDE**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (32, 64) to (32, 64)."""
        normed = layer_norm(x, self.weight, self.bias)
        return add(x, matmul(gelu(matmul(normed, self.up)), self.down))


def build() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Build the block and its input."""
    return TritonBlock().eval(), (torch.randn(ROWS, WIDTH),)
