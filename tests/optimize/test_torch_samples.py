"""PyTorch's own samples of its operators through all rewrites of -O1 and -O2: what eager torch computes."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from calling import place
from rewriting import check, optimize, with_triton_kernels
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nimblec.base.errors import CompileError
from nimblec.graph.definitions import Interpreter
from nimblec.pytorch.flat import flattened

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own, of what it will remove

DTYPES = (torch.float32, torch.int64)
PARTS = 4
MOST = 40
"""Samples of an operator that are made; the one in the middle is taken."""
UNSET = frozenset({"empty_like", "new_empty", "new_empty_strided"})
"""Operators whose results are what the memory held."""
NOT_INFERRED = frozenset({"nn.functional.max_unpool2d", "repeat_interleave"})
"""torch infers other strides than it computes, or cannot run what it infers."""
SKIPPED = UNSET | NOT_INFERRED
LEAST = 50
"""Samples of a part that must have been compared, so that refusals do not hide the rest."""


class Sample(nn.Module):
    """An operator with the arguments of a sample that are no tensors."""

    def __init__(self, operator: Any, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        super().__init__()
        self.operator, self.leaves, self.structure = operator, leaves, structure

    def forward(self, *tensors: Tensor) -> Any:
        """Return what the operator gives."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.operator(*args, **kwargs)


def _samples(operator: Any, dtype: torch.dtype) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    made = list(islice(operator.sample_inputs("cpu", dtype), MOST))
    for sample in made[len(made) // 2 :][:1]:
        leaves, structure = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if tensors and all(tensor.layout == torch.strided and tensor.numel() for tensor in tensors):
            yield Sample(operator.op, leaves, structure), [tensor.detach() for tensor in tensors]


def _compared(module: nn.Module, tensors: list[Tensor]) -> bool:
    """Return whether a sample runs and is compiled; then each graph gives what PyTorch gives."""
    try:
        wanted = [leaf for leaf in pytree.tree_leaves(module(*map(torch.clone, tensors))) if isinstance(leaf, Tensor)]
        flat = flattened(place(module, tuple(tensors), {}))
    except (RuntimeError, CompileError):  # some samples are of errors; what cannot be compiled is refused
        return False
    given = [tensor for _, tensor in flat.inputs]
    rewritten = optimize(flat.module, device="cuda")
    check(rewritten, *given)
    for graph in (flat.module, rewritten, with_triton_kernels(rewritten)):
        found = Interpreter(graph).run(*given)
        torch.testing.assert_close(list(found), wanted, rtol=1e-3, atol=1e-3, equal_nan=True)
    return True


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operator_is_what_pytorch_computes(dtype: torch.dtype, part: int) -> None:
    known = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest").op_db
    known = [each for each in known if each.name not in SKIPPED and not each.name.startswith("jiterator")]  # on a GPU
    operators = [each for each in known if dtype in each.supported_dtypes("cpu")]
    compared = 0
    for operator in operators[part::PARTS]:
        torch.manual_seed(0)
        with torch.no_grad():
            compared += sum(_compared(module, tensors) for module, tensors in _samples(operator, dtype))
    assert compared > LEAST
