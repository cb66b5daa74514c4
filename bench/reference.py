"""The weights and inputs that all measuring processes share, and the error of their outputs."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nimblec.base.difference import difference
from nimblec.base.errors import CompileError
from nimblec.pytorch.model import set_arithmetic
from nimblec.pytorch.sources import ModuleCall, import_entries
from nimblert.arrays.layouts import numpy_dtype

_SEED = 0  # the same as in nimblec's capture, so that its plan holds the same weights
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def seeded(spec: str, seed: int = _SEED) -> ModuleCall:
    """Build module, args and kwargs of ``package.module:callable`` on the CPU, the same in every process."""
    torch.manual_seed(seed)
    calls = import_entries(spec)
    if len(calls) > 1:
        raise CompileError(f"{spec}: returned the entries {list(calls)}, expected one")
    (call,) = calls.values()
    return call


def exact(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[np.ndarray]:
    """Return the floating-point outputs of eager PyTorch on the GPU in a wider dtype, with the same weights and inputs.

    A half-precision model is computed in float32 without TF32, a float32 model in float64.
    """
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    wide = copy.deepcopy(module).to("cuda", _WIDER[dtype])

    def widened(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to("cuda", _WIDER[dtype]) if leaf.is_floating_point() else leaf.cuda()

    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    set_arithmetic("fp32")
    args, kwargs = pytree.tree_map(widened, (args, kwargs))
    with torch.no_grad():
        outputs = floats(wide(*args, **kwargs))
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    del wide
    torch.cuda.empty_cache()
    return outputs


def floats(outputs: Any) -> list[np.ndarray]:
    """Return the floating-point tensors among a module's outputs, in order, as arrays on the host."""
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    wide = [t if t.dtype == torch.float64 else t.float() for t in tensors if t.is_floating_point()]
    return [t.cpu().numpy() for t in wide]


def host_arrays(inputs: Any) -> list[np.ndarray]:
    """Return the tensors among inputs, in order, as arrays in C order."""
    return [as_array(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array in C order, with nimblert's dtype."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def error(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest difference of any output, relative to the largest magnitude expected of it.

    Infinite where a NaN or an infinity stands on one side only.
    """
    return max(difference(right, output).relative for output, right in zip(outputs, expected, strict=True))
