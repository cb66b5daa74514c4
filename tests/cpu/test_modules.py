"""Modules of PyTorch on the CPU target whose export has a form of its own: control flow, complex numbers, padding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from control_models import Late
from forked import python
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_rows

import nimblec
import nimblert
from nimblec.base.errors import UnsupportedModelError
from nimblert.executable import Executable

X = torch.tensor([[0.5, -1.0, 2.0], [4.0, 0.25, -3.0]])
EMPTY = """
import torch, nimblec
try:
    nimblec.compile(torch.nn.LSTM(3, 4).eval(), (torch.zeros(5, 0, 3),), target="cpu")
except nimblec.UnsupportedModelError as exc:
    print(exc)
"""


def loaded(model: Callable[..., Any], *inputs: Tensor, **kwargs: Tensor) -> Executable:
    return nimblert.load(nimblec.compile(model, inputs, kwargs=kwargs, target="cpu", streams=1))


BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y.relu(), (x,)),
    "while": lambda x: while_loop(lambda y: y.sum() < 100, lambda y: (y.abs() * 2,), (x,))[0],
    "scan": lambda x: scan(lambda c, row: (c + row, c * row), torch.ones(3), x)[1],
    "map": lambda x: map_rows(lambda row, total: row.relu() * total, x, x.sum(0)),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_bodies_of_control_flow(name: str) -> None:
    with loaded(BODIES[name], X) as exe:
        for x in (X, -X, X.abs()):
            np.testing.assert_allclose(exe(x.numpy()), BODIES[name](x).numpy(), rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_loop_reads_old_values_beside_new_ones(count: int) -> None:
    model, x = Late().eval(), torch.randn(3, 64)
    with loaded(model, x, torch.tensor(2)) as exe, torch.no_grad():
        expected = model(x, torch.tensor(count))
        for mine, theirs in zip(exe(x.numpy(), np.array(count)), expected, strict=True):
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-4, atol=1e-4)


def test_a_complex_tensor_is_its_two_parts(caplog: pytest.LogCaptureFixture) -> None:
    turned = torch.complex(X, X.flip(1))
    with loaded(lambda z: z * 1j, turned) as exe:
        np.testing.assert_allclose(exe(torch.view_as_real(turned).numpy()), torch.view_as_real(turned * 1j).numpy())
    for tensor in ("input 'z'", "output 'output'"):
        assert f"{tensor} is complex: in the plan a last axis of 2 has its real and imaginary parts" in caplog.text


def test_views_of_complex_numbers() -> None:
    """As rotary embeddings have."""

    def model(x: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(3, 4), torch.arange(12.0).reshape(3, 4))
        turned = torch.view_as_complex(x) * turns[:, None, :]
        repeated = turned.unsqueeze(-1).expand(-1, -1, -1, 2)
        return torch.view_as_real(repeated[0] + repeated.select(-4, -1))

    x = torch.randn(3, 5, 4, 2)
    with loaded(model, x) as exe:
        np.testing.assert_allclose(exe(x.numpy()), model(x).numpy(), rtol=1e-5, atol=1e-6)


class Turning(nn.Module):
    """A sum of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the magnitude of x (3,)."""
        self.total: Tensor
        self.total.add_(torch.complex(x, 2 * x))
        return self.total.abs()


def test_a_complex_state_is_its_two_parts() -> None:
    model = Turning()
    with loaded(model, X[0]) as exe:
        for _ in range(3):
            np.testing.assert_allclose(exe(X[0].numpy()), model(X[0]).numpy(), rtol=1e-6)
        np.testing.assert_allclose(exe.state["total"], torch.view_as_real(model.total).numpy(), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_under_a_mask_of_padding(norm_first: bool) -> None:
    """In evaluation, torch may take nested tensors for it, and give zeros for what is padded."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x, padded = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[3], [4]])
    with loaded(model, x, src_key_padding_mask=padded) as exe:
        found = exe(x.numpy(), padded.numpy())
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=padded)
    np.testing.assert_allclose(found[~padded.numpy()], wanted[~padded].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_transformer_under_a_causal_mask(layers: int) -> None:
    """Its encoder and decoder compare the mask with the causal one, if not told whether it is."""
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, layers, layers, 16, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    source, target = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    with loaded(model, source, target, src_mask=mask, tgt_mask=mask) as exe:
        found = exe(source.numpy(), target.numpy(), mask.numpy(), mask.numpy())
    with torch.no_grad():
        wanted = model(source, target, src_mask=mask, tgt_mask=mask)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_indices_count_from_the_end_and_have_ends() -> None:
    words = nn.Embedding(4, 2).eval()
    table = words.weight.detach().numpy()
    with loaded(words, torch.tensor([0, 3])) as exe:
        for given in ([-1, -4], [3, 0]):
            np.testing.assert_array_equal(exe(np.array(given)), table[[3, 0]])
        for beyond in (4, -5):
            with pytest.raises(nimblert.InputError, match=rf"idx={beyond} must be within the inclusive range \[-4,3\]"):
                exe(np.array([0, beyond]))
        np.testing.assert_array_equal(exe(np.array([1, 2])), table[1:3])


def test_a_batch_of_nothing_does_not_end_the_process() -> None:
    """ONNX Runtime's LSTM does, so that no model is run there before a plan has refused it."""
    assert "LSTM: input 0 is empty" in python(EMPTY)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda x: {"x": x + 1}, "output 'x' is called as an input is: return it by another name"),
        (lambda x: {"a.b": x + 1, "a": {"b": x}}, "two outputs are called 'a.b': return them under different names"),
    ],
)
def test_names_that_are_taken(model: Callable[[Tensor], Any], sentence: str) -> None:
    with pytest.raises(UnsupportedModelError, match=sentence):
        nimblec.compile(model, (X,), target="cpu")
