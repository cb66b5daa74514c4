"""Models run by torch itself on the GPU, the reference for plans, bit for bit."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from nimblert.plan import Plan


class Eager:
    """A module on a device, called with arrays for the tensors among its example inputs, in their order."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        device: str = "cuda",
    ) -> None:
        leaves, structure = tree_flatten((tuple(args), dict(kwargs or {})))
        self._tensors = [leaf.to(device, copy=True) for leaf in leaves]
        self._args, self._kwargs = tree_unflatten(self._tensors, structure)
        self._module = module.to(device)

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return every tensor that the module returns, as an array in C order."""
        with torch.no_grad():
            for tensor, array in zip(self._tensors, arrays, strict=True):
                tensor.copy_(as_tensor(array))
            return [as_array(t) for t in tree_leaves(self._module(*self._args, **self._kwargs))]


def build(model: str, device: str = "cuda") -> Eager:
    """Build the model named "module:callable" with the weights that the compiler gives it."""
    name, _, builder = model.partition(":")
    torch.manual_seed(0)
    return Eager(*getattr(importlib.import_module(name), builder)(), device=device)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over the array's memory."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor, in C order."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def assert_equal(plan: Plan, outputs: Mapping[str, np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Check that outputs equal torch's, bit for bit unless torch's own two runs differ."""
    program = plan.programs[0]
    assert program.golden is not None
    for (name, actual), wanted in zip(outputs.items(), expected, strict=True):
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape), name
        if program.golden.tolerance == 0:
            assert actual.tobytes() == wanted.tobytes(), (
                f"{name}: {np.count_nonzero(actual != wanted)} of {wanted.size} values differ"
            )
        else:
            scale = np.abs(wanted).max()
            assert np.abs(actual - wanted).max() <= 4 * program.golden.tolerance * scale, name
