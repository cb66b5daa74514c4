"""The weights that a captured module reads unchanged from their own memory."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch

from nimblec.base.ir import BufferKind, Graph
from nimblec.pytorch.model import TorchModel
from nimblec.pytorch.tensors import DTYPE_NAMES


def with_weights(graph: Graph, original: TorchModel, *, as_it_runs: bool) -> Graph:
    """Return ``graph``, captured from a model or its rewritten form, with the names of replaceable weights.

    A rewritten model may have folded the values of its weights, and so may one from ONNX or torch.compile.
    """
    named = _named(original.module)
    if not as_it_runs or original.is_flat or original.is_compiled:
        return replace(graph, weights=(), folded=frozenset(named))
    tensors: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in named.items():
        tensors[tensor.untyped_storage()._cdata][name] = tensor
    found = []
    for index, buffer in enumerate(graph.buffers):
        sharing = tensors.get(buffer.storage, {})
        if buffer.kind is BufferKind.CONSTANT and buffer.name in sharing and all(map(_is_whole, sharing.values())):
            tensor = sharing[buffer.name]
            if (DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape)) == (buffer.dtype, buffer.shape):
                found.append((buffer.name, index))
    held = {name for name, _ in found}
    return replace(graph, weights=tuple(found), folded=frozenset(named) - held)


def _named(module: Any) -> dict[str, torch.Tensor]:
    if not isinstance(module, torch.nn.Module):
        return {}
    return dict((*module.named_parameters(), *module.named_buffers()))


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor spans its storage, in C order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
