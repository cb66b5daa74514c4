"""Which tensors of a process a recording takes along."""

import pytest
import torch

from nimblec.cuda.capture.residents import _names, only_in


def test_residents_move_shared_weights_only() -> None:
    original = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5))
    rewritten = torch.nn.Sequential(torch.nn.Linear(3, 4), original[2])
    taken = only_in([original], rewritten)
    assert taken == {t.data_ptr() for part in original[:2] for t in (*part.parameters(), *part.buffers())}
    assert only_in([original], original) == set()
    assert only_in([], rewritten) == set()


def test_a_function_holds_whatever_it_may() -> None:
    layer = torch.nn.Linear(3, 4)
    assert only_in([torch.relu], layer) == set()
    assert only_in([layer], torch.relu) == {layer.weight.data_ptr(), layer.bias.data_ptr()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
def test_what_torch_compile_wrapped_keeps_its_names() -> None:
    layer = torch.nn.Linear(3, 4)
    assert (
        _names(torch.compile(layer))
        == _names(layer)
        == {layer.weight.data_ptr(): "weight", layer.bias.data_ptr(): "bias"}
    )
