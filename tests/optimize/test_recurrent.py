"""LSTM, GRU and RNN: each stays one call, which cuDNN serves on a GPU."""

from typing import Any

import pytest
import torch
from rewriting import assert_same, check, counts, optimize
from torch import Tensor, nn

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph import recorder
from nimblec.graph.rewriter import bound, fake
from nimblec.pytorch.aten_graph import trace

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

STEPS, BATCH, WIDTH, HIDDEN = 5, 3, 8, 6

KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any], str]] = {
    "lstm": (nn.LSTM, {}, "lstm"),
    "two layers, both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "dropout": 0.5}, "lstm"),
    "projections": (nn.LSTM, {"proj_size": 4, "num_layers": 2}, "lstm"),
    "without biases": (nn.LSTM, {"bias": False, "batch_first": True}, "lstm"),
    "gru": (nn.GRU, {"num_layers": 2, "batch_first": True, "bidirectional": True}, "gru"),
    "tanh": (nn.RNN, {"bidirectional": True}, "rnn_tanh"),
    "relu": (nn.RNN, {"nonlinearity": "relu", "batch_first": True}, "rnn_relu"),
}


def _built(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.RNNBase, Tensor, Any]:
    """Return the network, its inputs, and the state that it would start with if it were told to."""
    torch.manual_seed(0)
    kind, settings, _ = KINDS[name]
    network = kind(WIDTH, HIDDEN, **settings).eval().to(dtype)
    x = torch.randn((BATCH, STEPS, WIDTH) if network.batch_first else (STEPS, BATCH, WIDTH), dtype=dtype)
    layers = network.num_layers * (2 if network.bidirectional else 1)
    cell = torch.randn(layers, BATCH, HIDDEN, dtype=dtype)
    hidden = torch.randn(layers, BATCH, network.proj_size or HIDDEN, dtype=dtype)
    return network, x, (hidden, cell) if kind is nn.LSTM else hidden


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "given"])
@pytest.mark.parametrize("name", KINDS)
def test_a_network_is_one_call(name: str, given: bool) -> None:
    network, x, state = _built(name)
    args = (x, state) if given else (x,)
    program = trace(network, args)
    check(program.module)
    assert counts(program.module) == {KINDS[name][2]: 1}
    tensors = [x, *(state if isinstance(state, tuple) else (state,))] if given else [x]
    with torch.no_grad():
        torch.testing.assert_close(program.nest(program.module(*tensors)), network(*args))
    rewritten = optimize(program.module, device="cuda")
    check(rewritten)
    assert_same(program.module, rewritten, *tensors)


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_is_for_the_whole_network(name: str) -> None:
    network, x, _ = _built(name)
    before = trace(network, (x,)).module
    after = optimize(before, device="cuda", dtype=torch.float16)
    (call,) = (node for node in after.graph.nodes if "hx" in str(getattr(node.target, "_schema", "")))
    assert {fake(node).dtype for node in call.all_input_nodes} == {torch.float16}
    assert_same(before, after, x, rtol=5e-3)


@pytest.mark.parametrize("name", KINDS)
def test_a_network_for_a_gpu_is_traced_on_any_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "on_device", lambda constants, _device: dict(constants))
    network, x, _ = _built(name, torch.float16)
    module = trace(network, (x,), device="cuda").module
    assert counts(module) == {KINDS[name][2]: 1}
    (output, *_) = module.graph.output_node().all_input_nodes
    assert fake(output).device == torch.device("cuda:0")


def test_dropout_in_training_is_refused() -> None:
    network, x, _ = _built("two layers, both directions")
    with pytest.raises(UnsupportedModelError, match="draws random numbers"):
        trace(network.train(), (x,))


class _Encoder(nn.Module):
    """Makes the state of a GRU with its batch first, as a linear layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, HIDDEN, num_layers=2)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """Map (steps, batch, width) and (batch, layers, hidden) to (steps, batch, hidden)."""
        return self.gru(x, torch.tanh(state.transpose(0, 1).contiguous()))[0]


def test_the_state_is_contiguous_where_no_copy_before_it_is_left() -> None:
    torch.manual_seed(0)
    args = torch.randn(STEPS, BATCH, WIDTH), torch.randn(BATCH, 2, HIDDEN)
    before = trace(_Encoder().eval(), args).module
    after = optimize(before, device="cuda")
    (call,) = (node for node in after.graph.nodes if node.target is torch.ops.aten.gru.input)
    assert fake(bound(call)["hx"]).is_contiguous()
    assert_same(before, after, *args)
