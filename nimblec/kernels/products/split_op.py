"""Factors of a float32 product as factors of bfloat16, a torch op: `nimblec.kernels.launch` says what an op is.

A number of 24 bits is the sum of three of bfloat16. Of the nine products of two such sums the six largest matter, and
they are one product of bfloat16 along an axis six times as long, the smallest first: tensor cores cut off what they add
to a large sum. An infinite number gives NaN. Source: Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial
Intelligence Datatype for Higher-Precision Computations (ARITH 2019), there BF16x3 with six products.
"""

import torch
from torch import Tensor

from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.shapes import ceil_div

PAIRS = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))
"""The parts of the left and of the right factor that are multiplied, numbered from the largest."""
_BLOCK = 1024


def _split(x: Tensor, side: int, axis: int, trigger: str) -> Prepared[Tensor]:
    assert x.is_contiguous(), f"a matrix of strides {x.stride()}"
    rows, columns = x.shape
    sizes = (rows, len(PAIRS) * columns) if axis else (len(PAIRS) * rows, columns)
    out = torch.empty(sizes, dtype=torch.bfloat16, device=x.device)
    launch = Launch(
        template="nimblec.kernels.products.split_template:split",
        blocks=ceil_div(x.numel(), _BLOCK),
        pointers={"x_ptr": x, "out_ptr": out},
        settings={
            "COUNT": x.numel(),
            "COLUMNS": columns,
            "ROW_STRIDE": sizes[1],
            "PART_STRIDE": columns if axis else x.numel(),
            "IS_RIGHT": bool(side),
            "BLOCK": _BLOCK,
            "num_warps": 4,
        },
        trigger=trigger,
    )
    return Prepared(out, launch)


def _split_on_cpu(x: Tensor, side: int, axis: int, _trigger: str) -> Tensor:
    parts, rest = [], x
    for _ in range(3):
        parts.append((rest.view(torch.int32) & -(1 << 16)).view(torch.float32))
        rest = rest - parts[-1]
    return torch.cat([parts[pair[side]] for pair in PAIRS], axis).bfloat16()


split = define_op("split(Tensor x, int side, int axis, str trigger) -> Tensor", prepare=_split, reference=_split_on_cpu)
"""The parts of a left (0) or right (1) factor, one after the other along the axis that the product sums."""
