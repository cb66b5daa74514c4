"""The whole optimiser on random networks: equal results, whatever the calls and their order."""

from collections.abc import Callable

import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import assert_same, check, optimize, record, rewritten
from torch import Tensor, fx

from nimblec.optimize.passes.biases import free_biases
from nimblec.optimize.passes.channels_last import propagate_channels_last
from nimblec.optimize.passes.convolutions import fuse_convolutions
from nimblec.optimize.passes.partition import extract, partition, replace

CHANNELS = 4
X = torch.randn(2, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Step = Callable[[Tensor, Tensor], Tensor]


def _constants(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) / 2


def _norm(x: Tensor, _: Tensor) -> Tensor:
    mean, variance = _constants(CHANNELS), _constants(CHANNELS).abs() + 0.5
    return torch.ops.aten._native_batch_norm_legit_no_training(x, variance, mean, mean, variance, 0.1, 1e-5)[0]


def _depthwise(x: Tensor, _: Tensor) -> Tensor:
    return torch.conv2d(x, _constants(CHANNELS, 1, 3, 3), _constants(CHANNELS), padding=1, groups=CHANNELS)


def _branches(x: Tensor, y: Tensor) -> Tensor:
    parts = [torch.conv2d(t, _constants(n, CHANNELS, 1, 1)) for t, n in ((x, 1), (y, 3))]
    return torch.cat(parts, 1)


def _squeeze(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(torch.conv2d(y.mean((2, 3), keepdim=True), _constants(CHANNELS, CHANNELS, 1, 1)))


def _attention(x: Tensor, y: Tensor) -> Tensor:
    """Attend by two linears on one input, with heads of 8 tokens and a causal mask."""
    rows = x.reshape(2 * 9, 16)
    keys = torch.addmm(_constants(16), rows, _constants(16, 16))
    values = torch.addmm(_constants(16), rows, _constants(16, 17)[:, 1:].contiguous())
    queries, keys, values = (t.reshape(2, 9, 2, 8).transpose(1, 2) for t in (y, keys, values))
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    scores = (queries @ keys.transpose(2, 3) / 8).masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, -1) @ values).transpose(1, 2).reshape(2, CHANNELS, 6, 6)


STEPS: tuple[Step, ...] = (
    lambda x, _: torch.relu(x),
    lambda x, _: torch.nn.functional.hardtanh(x, 0, 6),
    lambda x, y: x + y,
    lambda x, y: torch.relu(x + y),
    lambda x, _: torch.conv2d(x, _constants(CHANNELS, CHANNELS, 3, 3), padding=1),
    lambda x, _: torch.relu(torch.conv2d(x, _constants(CHANNELS, CHANNELS, 1, 1), _constants(CHANNELS))),
    lambda x, _: torch.conv_transpose2d(x, _constants(CHANNELS, CHANNELS, 3, 3), padding=1),
    lambda x, _: torch.nn.functional.max_pool2d(x, 3, 1, 1),
    lambda x, _: torch.nn.functional.gelu(x, approximate="tanh"),
    lambda x, _: x * 0.5 * (1 + torch.erf(x * 0.5**0.5)),
    lambda x, _: x.permute(0, 2, 3, 1).reshape(-1, CHANNELS).t().reshape(CHANNELS, 2, 6, 6).transpose(0, 1),
    lambda x, _: torch.relu(torch.addmm(_constants(18), x.reshape(-1, 18), _constants(18, 18))).reshape(x.shape),
    lambda x, _: x * _constants(CHANNELS, 1, 1) - 0.25,
    lambda x, _: torch.nn.functional.layer_norm(x, [6]),
    _norm,
    _norm,
    _depthwise,
    _branches,
    _squeeze,
    _attention,
)


def _network(data: st.DataObject) -> fx.GraphModule:
    steps = [data.draw(st.sampled_from(STEPS)) for _ in range(data.draw(st.integers(1, 10)))]
    # Mostly the latest two values, so that chains arise.
    back = st.sampled_from([0, 0, 0, 1])
    reads = [(max(0, n - data.draw(back)), data.draw(st.integers(0, n))) for n in range(len(steps))]
    extra = data.draw(st.integers(0, len(steps)))

    def model(x: Tensor) -> list[Tensor]:
        values = [x]
        for step, (first, second) in zip(steps, reads, strict=True):
            values.append(step(values[first], values[second]))
        return [values[-1], values[extra]]

    return record(model, X)


@examples(40)
@given(data=st.data())
def test_any_network(data: st.DataObject) -> None:
    before = _network(data)
    code = before.code
    for device in ("cpu", "cuda"):
        after = optimize(before, device=device)
        check(after)
        assert_same(before, after, X, rtol=1e-9)
    assert before.code == code


@examples(40)
@given(data=st.data())
def test_any_network_with_channels_last(data: st.DataObject) -> None:
    before = _network(data)
    after = rewritten(before, lambda module: propagate_channels_last(module, {torch.float64}), fuse_convolutions)
    assert_same(before, after, X, rtol=1e-9)


@examples(40)
@given(data=st.data())
def test_any_network_in_regions(data: st.DataObject) -> None:
    before = _network(data)
    after = optimize(before, device="cuda")
    free_biases(after)
    extracts = [extract(region) for region in partition(after)]
    replace(after, {lambda inputs, e=e: e.module(*inputs): [e] for e in extracts})
    assert_same(before, after, X, rtol=1e-9)
