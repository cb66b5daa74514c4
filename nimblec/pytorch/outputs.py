"""The outputs of a plan: the tensors that a model returns, and their names."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nimblec.base.errors import UnsupportedModelError
from nimblec.pytorch.tensors import check_dense


def join_path(name: str, path: Sequence[Any]) -> str:
    """Return a name and a pytree path as one dotted name."""
    parts = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
    return ".".join([name, *parts] if name else parts)


def name_outputs(result: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors a model returned, by name: its keys, or "output" and a number.

    None is not an output of a plan, but counts in the numbering. Raises UnsupportedModelError for anything
    else: a plan computes only tensors.
    """
    leaves = pytree.tree_flatten_with_path(result)[0]
    outputs = []
    for path, leaf in leaves:
        if leaf is None:
            continue
        if not isinstance(leaf, torch.Tensor):
            raise UnsupportedModelError(
                f"output {join_path('', path) or 0}: a {type(leaf).__name__}, and a plan returns tensors only: leave "
                "it out of the result, as use_cache=False does with the cache of transformers"
            )
        check_dense(f"output {join_path('', path) or 0}", leaf)
        outputs.append((_output_name(path, len(leaves)), leaf))
    counts = Counter(name for name, _ in outputs)
    if repeated := next((name for name, count in counts.items() if count > 1), None):
        raise UnsupportedModelError(f"two outputs are called {repeated!r}: return them under different names")
    if not outputs:
        raise UnsupportedModelError("the model returns no tensor: return those that it computes")
    return outputs


def cut_outputs(results: Sequence[Any], cropped: Sequence[int]) -> list[Any]:
    """Return the outputs of a run, those at the indices ``cropped`` cut to their sizes, which follow the outputs.

    A size larger than an output's bound leaves the output whole.
    """
    outputs = list(results[: len(results) - len(cropped)])
    for index, sizes in zip(cropped, results[len(outputs) :], strict=True):
        outputs[index] = outputs[index][tuple(slice(int(size)) for size in sizes)]
    return outputs


def results_by_name(_module: torch.nn.Module, _args: object, result: Any) -> dict[str, torch.Tensor]:
    """Return a forward hook: the outputs by name, without classes that another process might not have."""
    return dict(name_outputs(result))


def missing_outputs(result: Any) -> tuple[str, ...]:
    """Return a note for each None that a model returned."""
    leaves = pytree.tree_flatten_with_path(result)[0]
    names = (_output_name(path, len(leaves)) for path, leaf in leaves if leaf is None)
    return tuple(f"the model returns None as {name!r}: the plan has no such output" for name in names)


def _output_name(path: Sequence[Any], count: int) -> str:
    name = join_path("", path)
    if not name or (count == 1 and name.isdigit()):
        return "output"
    return f"output_{name}" if name[0].isdigit() else name
