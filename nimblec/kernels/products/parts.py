"""Parts of larger images as torch ops in the namespace ``nimblec``: `place` writes one, `joined` depends on all.

A concatenation is memory for the whole, a `place` call for each part of it, and the whole as the result of
`joined`. Only `place` launches anything.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

_LIBRARY = torch.library.Library("nimblec", "FRAGMENT")
"""The ops live as long as this module."""

_LIBRARY.define("place(Tensor(a!) where, Tensor part) -> Tensor(a!)")
_LIBRARY.define("joined(Tensor(a!) whole, Tensor[] parts, int channels) -> Tensor(a!)")


def _place(where: Tensor, part: Tensor) -> Tensor:
    return where.copy_(part)


def _joined(whole: Tensor, parts: Sequence[Tensor], channels: int) -> Tensor:  # noqa: ARG001 - they have been written
    return whole.narrow(1, 0, channels)


for _name, _implementation in (("place", _place), ("joined", _joined)):
    torch.library.register_fake(f"nimblec::{_name}", _implementation, lib=_LIBRARY)
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")

place: OpOverload = torch.ops.nimblec.place.default
"""Copy a part to its place in the whole."""
joined: OpOverload = torch.ops.nimblec.joined.default
"""The first ``channels`` of the whole, after all parts have been written."""
IMPLEMENTATIONS: dict[OpOverload, Callable[..., Tensor]] = {place: _place, joined: _joined}
"""The same in ATen calls."""
