"""Recurrent layers on a GPU: values against float64, and twenty runs that give the same bits."""

import pytest
import torch
from torch import Tensor, nn

from nimblec.kernels.gpu import GPU
from nimblec.kernels.products.recurrence_op import gru_layer, lstm_layer, recurrence_shape
from nimblec.kernels.products.recurrence_tilings import recurrence_candidates

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper"), pytest.mark.timeout(120)]

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-2, torch.bfloat16: 6e-2}
STEPS = 33


def _layer(kind: str, hidden: int, batch: int, directions: int) -> tuple[nn.RNNBase, dict[str, Tensor]]:
    """Return a network of one layer in float64, and the arguments of the op in float64."""
    network = getattr(nn, kind)(hidden, hidden, bidirectional=directions == 2).cuda().double().eval()
    x = torch.randn(STEPS, batch, hidden, device="cuda").double()
    h, c = torch.randn(2, directions, batch, hidden, device="cuda").double()

    def weights(name: str) -> Tensor:
        ends = ["", "_reverse"][:directions]
        return torch.stack([getattr(network, f"{name}_l0{end}").detach() for end in ends])

    ih, hh, bias, recurrent = map(weights, ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    if kind == "GRU":
        reset = recurrent[:, 2 * hidden :].clone()
        recurrent[:, 2 * hidden :] = 0
    gates = torch.addmm((bias + recurrent).flatten(), x.flatten(0, 1), ih.flatten(0, 1).mT)
    given = {"gates": gates.view(STEPS, batch, -1), "weight": hh, "h": h}
    return network, given | ({"c": c} if kind == "LSTM" else {"bias": reset}) | {"x": x}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(("hidden", "batch"), [(512, 1), (256, 4), (200, 3), (64, 16)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_values(kind: str, hidden: int, batch: int, directions: int, dtype: torch.dtype) -> None:
    network, given = _layer(kind, hidden, batch, directions)
    x, state = given.pop("x"), given["h"]
    with torch.no_grad():
        y, last = network(x, (state, given["c"]) if kind == "LSTM" else state)
    expected = [y, *last] if kind == "LSTM" else [y, last]
    rounded = {name: value.to(dtype) for name, value in given.items()}
    shape = recurrence_shape(rounded["gates"], rounded["weight"])
    op = lstm_layer if kind == "LSTM" else gru_layer
    for tiling in recurrence_candidates(shape, GPU.current(), limit=2):
        results = [op(**rounded, tiling=tiling.numbers) for _ in range(20)]
        for found, wanted in zip(results[0], expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_a_nan_is_handed_on() -> None:
    """A NaN of any bits ends no wait: `UNWRITTEN` is one itself."""
    gates = torch.zeros(4, 1, 256, device="cuda")
    gates[1] = torch.full((256,), -1, dtype=torch.int32, device="cuda").view(torch.float32)
    weight = torch.zeros(1, 256, 64, device="cuda")
    y, *_ = lstm_layer(gates, weight, None, None, [4, 1, 2])
    assert y.isnan().flatten(1).all(1).tolist() == [False, True, True, True]
