"""Modules that make plain ATen calls, recorded without torch.export: the same graph, and the same refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calling import Calling, place
from torch import Tensor, fx, nn
from torch.nn import functional

import nimblec
from nimblec.base.errors import TraceError, UnsupportedModelError
from nimblec.graph.outputs import output_strides
from nimblec.graph.rewriter import fake
from nimblec.pytorch import aten_graph, flat
from nimblec.pytorch.recording import record

aten = torch.ops.aten

CONSTANT = torch.ones(2, 3)


def described(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Describe what a graph computes, how values lie in memory, and where calls are from, without nodes' names."""
    numbers: dict[fx.Node, str] = {}
    storages: dict[int, int] = {}
    found = []
    for node in graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        read = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda n: numbers[n])
        value: Any = None
        if node.op != "output" and isinstance(node.meta["val"], Tensor):
            value = fake(node)
            storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
            value = (value.dtype, value.shape, value.stride(), value.storage_offset(), storage)
        found.append((node.op, node.target, repr(read), value, node.meta.get("source")))
    return found


def network(*, drops: bool) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), *[nn.Dropout()] * drops, nn.Linear(36, 5)),
    )


@pytest.mark.parametrize(
    ("make", "drops"),
    [
        (lambda p: torch.optim.AdamW(p, 0.1), False),  # random numbers are hundreds of calls
        pytest.param(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1), True, marks=pytest.mark.slow),
    ],
)
def test_a_training_step_is_recorded_as_its_export_is(
    make: Callable[[Any], torch.optim.Optimizer], drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = network(drops=drops)
    batch = torch.randn(2, 3, 8, 8), torch.randint(0, 5, (2,))
    step = nimblec.training_step(model, functional.cross_entropy, make(model.parameters()), batch, clip_norm=1.0)
    call = place(*step["train"])
    recorded = flat.flattened(call)
    monkeypatch.setattr(flat, "record", aten_graph.trace)
    exported = flat.flattened(call)
    found, wanted = (described(each.module.graph) for each in (recorded, exported))
    assert any(target is aten._native_batch_norm_legit_functional.default for _, target, *_ in found)
    assert found == wanted
    results = torch.arange(len(output_strides(recorded.module))).unbind()
    assert recorded.nest is not None
    assert exported.nest is not None
    assert recorded.nest(results) == exported.nest(results) == {"loss": results[0]}


def test_writes_in_place_become_values() -> None:
    def written(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.clone()
        row, same = y[0], y.detach()
        y.mul_(2.0)
        row.add_(1.0)
        return y, row.clone(), same + 1

    x = torch.randn(2, 3)
    module = record(Calling(written), (x,), device="cpu").module
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert not any(target._schema.is_mutable for target in calls)
    for found, wanted in zip(module(x), written(x), strict=True):
        assert torch.equal(found, wanted)


def test_recording_returns_written_statistics() -> None:
    def normed(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = x.new_zeros(3), x.new_ones(3)
        y = aten.native_batch_norm.default(x, None, None, mean, variance, True, 0.5, 1e-5)[0]
        return y, mean

    x = torch.randn(4, 3)
    for found, wanted in zip(record(Calling(normed), (x,), device="cpu").module(x), normed(x), strict=True):
        assert torch.equal(found, wanted)


def test_what_depends_on_no_argument_is_computed_at_once() -> None:
    def shifted(x: Tensor) -> Tensor:
        return x + aten.arange.default(3, device=torch.device("meta"))  # as on any device that the model names

    x = torch.randn(2, 3)
    module = record(Calling(shifted), (x,), device="cpu").module
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [aten.add.Tensor]
    (found,) = module(x)
    assert torch.equal(found, x + torch.arange(3))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: x.add_(1.0), UnsupportedModelError, "Calling writes into its input 'input_0'"),
        (lambda x: x[0].zero_(), UnsupportedModelError, "writes into its input 'input_0'"),
        (lambda x: x.t_() + 1, UnsupportedModelError, "writes into its input 'input_0'"),
        (lambda x: x + torch.rand(3), UnsupportedModelError, "draws random numbers"),
        (lambda x: x + torch.rand_like(x), UnsupportedModelError, "draws random numbers"),
        (lambda x: x * x.sum().item(), TraceError, "Calling: line .* on the value of a tensor, and a plan is static"),
        (lambda x: x + CONSTANT.add_(1.0), TraceError, "writes into a constant"),
        (CONSTANT.add_, TraceError, "Calling: the recorder refuses it"),
        (torch.nonzero, TraceError, "Calling: line .* on the value of a tensor, and a plan is static"),
    ],
)
def test_recording_refuses(function: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    before = CONSTANT.clone()
    with pytest.raises(error, match=message):
        record(Calling(function), (torch.randn(2, 3),), device="cpu")
    assert torch.equal(CONSTANT, before)
