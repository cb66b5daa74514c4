"""LSTM and GRU layers as launches of one kernel: what is taken, the values, and the blocks that must be resident."""

from typing import Any

import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from rewriting import assert_same, check, counts, optimize, run
from torch import Tensor, fx, nn

from nimblec.graph.rewriter import bound, fake
from nimblec.kernels.gpu import KNOWN, SM_90
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products.recurrence_op import gru_layer, lstm_layer
from nimblec.kernels.products.recurrence_rewrite import RECURRENCE, requests
from nimblec.kernels.products.recurrence_tilings import Recurrence, RecurrenceTiling, recurrence_candidates
from nimblec.onnx_import.importer import import_model
from nimblec.pytorch.aten_graph import trace

STEPS, BATCH, WIDTH, HIDDEN = 5, 3, 8, 16

KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any], int]] = {
    "lstm": (nn.LSTM, {}, 1),
    "two layers, both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}, 2),
    "without biases, batch first": (nn.LSTM, {"bias": False, "batch_first": True, "num_layers": 3}, 3),
    "gru": (nn.GRU, {"batch_first": True}, 1),
    "gru, two layers, both directions": (nn.GRU, {"num_layers": 2, "bidirectional": True}, 2),
    "gru without biases": (nn.GRU, {"bias": False}, 1),
    "projections": (nn.LSTM, {"proj_size": 4}, 0),
    "tanh": (nn.RNN, {}, 0),
}


def _graph(name: str, dtype: torch.dtype, *, given: bool) -> tuple[fx.GraphModule, list[Tensor]]:
    torch.manual_seed(0)
    kind, settings, _ = KINDS[name]
    network = kind(WIDTH, HIDDEN, **settings).eval().to(dtype)
    x = torch.randn((BATCH, STEPS, WIDTH) if network.batch_first else (STEPS, BATCH, WIDTH), dtype=dtype)
    layers = network.num_layers * (2 if network.bidirectional else 1)
    h, c = (torch.randn(layers, BATCH, size, dtype=dtype) for size in (network.proj_size or HIDDEN, HIDDEN))
    state = (h, c) if kind is nn.LSTM else h
    module = trace(network, (x, state) if given else (x,)).module
    return optimize(module, device="cuda"), [x, *([h, c] if kind is nn.LSTM else [h])] if given else [x]


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "given"])
@pytest.mark.parametrize("name", KINDS)
def test_layers_are_launches_of_the_same_values(name: str, given: bool) -> None:
    module, inputs = _graph(name, torch.float32, given=given)
    before, expected = counts(module), run(module, *inputs)
    RECURRENCE.use_first(module, SM_90)
    check(module)
    launches = [node for node in module.graph.nodes if node.target in {lstm_layer, gru_layer}]
    assert len(launches) == KINDS[name][2]
    assert counts(module) == before if not launches else not {*counts(module)} & {*before}
    for result, wanted in zip(run(module, *inputs), expected, strict=True):
        torch.testing.assert_close(result, wanted)
        assert result.stride() == wanted.stride()
    initial = [bound(node)[state] for node in launches for state in ("h", "c") if state in bound(node)]
    assert all((state is not None) == given for state in initial)


@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_onnx_layers_are_launches(kind: str, direction: str, has_lengths: bool) -> None:
    """With lengths each direction is a launch, since the steps of the second follow another order in each sequence."""
    generator = torch.Generator().manual_seed(0)
    directions, rows = 2 if direction == "bidirectional" else 1, HIDDEN * (4 if kind == "LSTM" else 3)
    sizes = {"w": (directions, rows, WIDTH), "r": (directions, rows, HIDDEN), "b": (directions, 2 * rows)}
    weights = {name: torch.rand(size, generator=generator) - 0.5 for name, size in sizes.items()}
    outputs = ["y", "y_h", "y_c"][: 3 if kind == "LSTM" else 2]
    others = {} if kind == "LSTM" else {"linear_before_reset": 1}
    names = ["x", *sizes, *(["lengths"] if has_lengths else [])]
    node = helper.make_node(kind, names, outputs, hidden_size=HIDDEN, direction=direction, **others)
    shapes = {"x": (TensorProto.FLOAT, (STEPS, BATCH, WIDTH)), "lengths": (TensorProto.INT32, (BATCH,))}
    graph = helper.make_graph(
        [node],
        "recurrent",
        [helper.make_tensor_value_info(name, *shapes[name]) for name in names if name in shapes],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value.numpy(), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    module = optimize(import_model(model).module, device="cuda")
    inputs = [torch.rand(STEPS, BATCH, WIDTH, generator=generator), torch.tensor([5, 1, 3], dtype=torch.int32)]
    expected = run(module, *inputs[: 1 + has_lengths])
    RECURRENCE.use_first(module, SM_90)
    check(module)
    launches = [node for node in module.graph.nodes if node.target in {lstm_layer, gru_layer}]
    assert len(launches) == (directions if has_lengths else 1)
    for result, wanted in zip(run(module, *inputs[: 1 + has_lengths]), expected, strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_layers_hand_on_rounded_states(name: str) -> None:
    module, inputs = _graph(name, torch.float16, given=True)
    after = fx.GraphModule(module, module.graph.__deepcopy__())
    RECURRENCE.use_first(after, SM_90)
    assert {fake(node).dtype for node in after.graph.nodes if isinstance(node.meta.get("val"), Tensor)} == {torch.half}
    assert_same(module, after, *inputs, rtol=5e-3)


def test_a_call_for_timing_is_like_that_of_a_layer() -> None:
    """So a kernel that was timed is not compiled again."""
    module, _ = _graph("two layers, both directions", torch.float32, given=True)
    (request,) = requests(module)
    (tiling, *_) = RECURRENCE.tilings(request, SM_90)
    timed = RECURRENCE.call(request, tiling, "late").job()
    RECURRENCE.use_first(module, SM_90)
    for node in module.graph.nodes:
        if node.target is lstm_layer:
            args = fx.map_arg(tuple(node.args), lambda n: fake(n).to("meta"))
            assert launch_of(lstm_layer, *args).job == timed


def _shape(hidden: int, batch: int, directions: int, **others: int) -> Recurrence:
    given = {"gates": 4, "steps": 8, "itemsize": 4} | others
    return Recurrence(hidden=hidden, batch=batch, directions=directions, **given)


@pytest.mark.parametrize("gpu", KNOWN, ids=lambda gpu: str(gpu.architecture))
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("hidden", [48, 64, 200, 512, 1024])
def test_candidates_are_resident_at_once(hidden: int, batch: int, directions: int, gpu: Any) -> None:
    """A multiprocessor has 65,536 registers; with 255 of them a thread, those of a warp take 8,192."""
    for itemsize in (2, 4):
        for tiling in recurrence_candidates(_shape(hidden, batch, directions, itemsize=itemsize), gpu):
            warps = tiling.num_warps * tiling.blocks(_shape(hidden, batch, directions))
            assert warps * 8192 <= gpu.multiprocessors * 65536
            assert hidden % tiling.units == batch % tiling.rows == 0


def test_candidates_cover_the_usual_sizes_and_no_larger_ones() -> None:
    assert all(recurrence_candidates(_shape(hidden, 16, 1), SM_90) for hidden in (64, 128, 256, 512))
    assert recurrence_candidates(_shape(1024, 1, 1), SM_90)
    assert not recurrence_candidates(_shape(2048, 1, 1), SM_90)
    assert not recurrence_candidates(_shape(51, 1, 1), SM_90)


def test_no_element_is_written_before_the_launch() -> None:
    gates, weight = torch.zeros(2, 1, 64), torch.zeros(1, 64, 16)
    tiling = RecurrenceTiling(units=4, rows=1, num_warps=1)
    launch = launch_of(lstm_layer, gates, weight, None, None, tiling.numbers)
    y = launch.pointers["y_ptr"]
    assert y is not None
    assert y.dtype == torch.float32
    assert (y.view(torch.int32) == -1).all()
    assert launch.settings["launch_cooperative_grid"]
