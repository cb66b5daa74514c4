"""Run a model twice on equal inputs: a graph can hold neither randomness nor state outside of it."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nimblec.base.difference import Difference, difference
from nimblec.base.errors import UnsupportedModelError, user_code
from nimblec.pytorch.borrowed import Originals
from nimblec.pytorch.model import TorchModel
from nimblec.pytorch.outputs import name_outputs

_ROUNDING = 1e-3
"""Relative to the largest magnitude: the difference that the order of threads may make in sums."""
_HALF_ULPS = 8
"""The same in units of the last place, for half precision."""
_TIES = 0.01
"""The share of integers and bools that rounding may change, as in an argmax of equal values."""


def refuse_differing(name: str, first: Sequence[tuple[str, Tensor]], second: Sequence[tuple[str, Tensor]]) -> None:
    """Raise UnsupportedModelError if outputs of two runs, by name, differ by more than rounding."""
    found = dict(second)
    for output, before in first:
        if output not in found or not _differ_by_rounding(before, found[output]):
            raise UnsupportedModelError(
                f"{name}: two runs on equal inputs differ in output {output!r}: the model draws random numbers or has "
                "a state, and a plan draws none and keeps a state only in buffers: call .eval() first, or make the "
                "state in __init__ with register_buffer and write into it in place (self.state.copy_(...))"
            )


def run_twice(name: str, model: TorchModel, originals: Originals | None = None) -> Any:
    """Return the model's result; two runs must agree, from the same buffers and parameters if ``originals`` are given.

    Raises TraceError if the model cannot be run, UnsupportedModelError if the runs differ.
    """
    state = [] if originals is None else [*_state(model.module, originals)]

    def run() -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (model.args, model.kwargs))
        with torch.no_grad():
            with user_code(f"{name} cannot be run on its example inputs"):
                result = pytree.tree_map_only(torch.Tensor, torch.clone, model.module(*args, **kwargs))
            for restore in state:
                restore()
        return result

    first = run()
    refuse_differing(name, name_outputs(first), name_outputs(run()))
    return first


def _state(module: Any, originals: Originals) -> Iterator[Callable[[], object]]:
    """Yield functions that restore the registered tensors of a borrowed module, and their values."""
    if isinstance(module, torch.nn.Module):
        for part in module.modules():
            yield partial(part._buffers.update, dict(part._buffers))
    for tensor, values in originals:
        yield partial(tensor.copy_, values)


def compared(expected: Tensor, found: Tensor) -> Difference:
    """Return the difference of two tensors, infinite if their shapes differ."""
    if expected.shape != found.shape:
        return Difference(absolute=math.inf, relative=math.inf, exact=False)
    wide = torch.float64 if expected.is_floating_point() else expected.dtype
    tensors = (tensor.detach().cpu().to(wide).resolve_conj().resolve_neg() for tensor in (expected, found))
    return difference(*(tensor.numpy() for tensor in tensors))


def _differ_by_rounding(first: Tensor, second: Tensor) -> bool:
    difference = compared(first, second)
    if difference.exact and first.shape == second.shape:
        return int((first != second).sum()) <= _TIES * first.numel()
    eps = torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
    return difference.within(max(_ROUNDING, _HALF_ULPS * eps))
