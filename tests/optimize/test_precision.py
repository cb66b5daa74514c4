"""Half precision inside, the model's own dtypes outside: as near to the truth as a model in half precision."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from examples import examples
from exported_models import MODELS, export
from families import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from rewriting import check, counts, eager, family, optimize, randomize, record, rewritten, run
from torch import Tensor, fx, nn

from nimblec.base.errors import UnsupportedModelError
from nimblec.onnx_import.importer import import_model
from nimblec.optimize.passes.cast import cast
from nimblec.pytorch.aten_graph import trace

aten = torch.ops.aten

HALVES = (torch.float16, torch.bfloat16)
LOWEST = torch.finfo(torch.float32).min


def in_half(graph: fx.GraphModule, dtype: torch.dtype) -> fx.GraphModule:
    """Return a copy of a graph in half precision, which must be well formed, without detours, and final."""
    after = rewritten(graph, lambda module: cast(module, dtype))
    for node in after.graph.nodes:
        casts = [user for user in node.users if user.target is aten._to_copy.default]
        halves = [user for user in casts if user.meta["val"].dtype == dtype]
        assert len(halves) <= 1, f"{node} is cast twice"
        is_back = halves and node.target is aten._to_copy.default and node.args[0].meta["val"].dtype == dtype
        assert not is_back, f"{node} is cast there and back"
    assert rewritten(after, lambda module: cast(module, dtype)).code == after.code
    for said, got in zip(_values(graph), _values(after), strict=True):
        assert (said.dtype, said.shape, said.stride()) == (got.dtype, got.shape, got.stride())
    return after


def _values(graph: fx.GraphModule) -> list[Tensor]:
    """Return inputs and outputs."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [node.meta["val"] for node in (*inputs, *graph.graph.output_node().args[0])]


def error(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """Return the largest relative error of an output, by norms."""
    pairs = zip(wanted, got, strict=True)
    return max(float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-30)) for a, b in pairs)


def bound_of(dtype: torch.dtype) -> float:
    """Return the error that a small model may have: a few roundings."""
    return 4 * torch.finfo(dtype).eps


def dtypes(graph: fx.GraphModule, target: Any) -> list[list[torch.dtype]]:
    """Return the dtypes of the tensors that each call of ``target`` takes."""
    calls = [node for node in graph.graph.nodes if node.target is target]
    return [[n.meta["val"].dtype for n in node.all_input_nodes] for node in calls]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in (*FAMILIES, "densenet")),
        *((name, torch.bfloat16) for name in ("resnet", "bert")),
    ],
)
def test_a_family_is_as_near_to_the_truth_as_in_half_precision(name: str, dtype: torch.dtype) -> None:
    before, inputs = family(name, torch.float32)
    truth = eager(name, torch.float64)
    after = in_half(before, dtype)
    wanted = error(truth, eager(name, dtype))
    assert error(truth, run(after, *inputs)) <= 1.5 * wanted + bound_of(dtype)
    assert counts(after)["_to_copy"] <= 2 + len(truth)
    for whole in (
        optimize(after, device="cuda"),
        optimize(in_half(optimize(before, device="cpu"), dtype), device="cuda"),
    ):
        check(whole)
        assert error(truth, run(whole, *inputs)) <= 1.5 * wanted + bound_of(dtype)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gru_tagger"])
def test_a_model_of_torch(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    before = trace(randomize(module.eval()), inputs).module
    truth = run(before, *inputs)
    for dtype in HALVES:
        after = in_half(before, dtype)
        assert error(truth, run(after, *inputs)) <= bound_of(dtype)
        assert counts(after)["_to_copy"] <= counts(before)["_to_copy"] + 6
        halves = [
            value
            for name in ("mm", "addmm", "bmm", "convolution")
            for value in dtypes(after, getattr(aten, name).default)
        ]
        assert halves
        assert all({*call} == {dtype} for call in halves)


@pytest.mark.parametrize("name", ["gru_tagger", "bert", "llama", "convnext", "distilbert"])
def test_an_onnx_file(name: str, tmp_path: Path) -> None:
    """Its norms and activations are written out in small calls."""
    feed = export(name, 17, tmp_path / "model.onnx")
    before = import_model(onnx.load(tmp_path / "model.onnx")).module
    inputs = [torch.from_numpy(value) for value in feed.values()]
    for dtype in HALVES:
        after = in_half(before, dtype)
        assert error(run(before, *inputs), run(after, *inputs)) <= bound_of(dtype)


def test_weights_are_rounded_once_and_tied_ones_stay_tied() -> None:
    weight = torch.randn(8, 8)
    after = in_half(record(lambda x: (x @ weight).relu() @ weight, torch.randn(2, 8)), torch.float16)
    (constant,) = [node for node in after.graph.nodes if node.op == "get_attr"]
    assert torch.equal(getattr(after, constant.target), weight.half())
    assert counts(after) == {"mm": 2, "relu": 1, "_to_copy": 2}


@pytest.mark.parametrize("dtype", HALVES)
def test_a_graph_in_half_precision_stays(dtype: torch.dtype) -> None:
    for name in ("bert", "mobilenet"):
        before, _ = family(name, dtype)
        assert rewritten(before, lambda module: cast(module, dtype)).code == before.code


def test_integers_and_bools_stay() -> None:
    def model(ids: Tensor, keep: Tensor, x: Tensor) -> list[Tensor]:
        picked = torch.where(keep, x[:, ids], x.flip(1))
        return [picked.argmax(1), ids * 2 + 1, keep & (picked > 0), x.sort(1)[1]]

    inputs = (torch.tensor([3, 1, 0, 2]), torch.tensor([True, False, True, True]), torch.randn(2, 4))
    before = record(model, *inputs)
    after = in_half(before, torch.float16)
    assert all(torch.equal(*pair) for pair in zip(run(before, *inputs), run(after, *inputs), strict=True))
    assert counts(after)["_to_copy"] == 1


@pytest.mark.parametrize("square", [lambda x: x.pow(2), lambda x: x * x])
def test_a_norm_by_hand_squares_in_float32(square: Callable[[Tensor], Tensor]) -> None:
    scale, weight = torch.rand(16), torch.eye(16)

    def model(x: Tensor) -> Tensor:
        y = x @ weight
        return (y * torch.rsqrt(square(y).mean(-1, keepdim=True) + 1e-6) * scale) @ weight

    x = 3000 * torch.randn(4, 16)  # squares are beyond float16
    before = record(model, x)
    after = in_half(before, torch.float16)
    assert error(run(before, x), run(after, x)) <= bound_of(torch.float16)
    assert dtypes(after, aten.rsqrt.default) == [[torch.float32]]
    assert dtypes(after, aten.mm.default) == [[torch.float16] * 2] * 2


@pytest.mark.parametrize("dtype", HALVES)
def test_a_softmax_and_a_variance_by_hand(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 8)

    def model(x: Tensor) -> Tensor:
        y = 40 * (x @ weight)
        shares = (y / 20).exp()  # beyond float16 without a maximum taken off
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True) + 1e-5).sqrt()
        return (shares / shares.sum(-1, keepdim=True)) @ weight + y

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    before = record(model, x)
    after = in_half(before, dtype)
    assert error(run(before, x), run(after, x)) <= 30 * torch.finfo(dtype).eps  # exp multiplies errors
    assert dtypes(after, aten.sum.dim_IntList) == [[torch.float32]]


def test_half_sums_are_made_in_float32() -> None:
    x, weight = torch.full((2, 512), 20.0), torch.eye(512)
    before = record(lambda x: (x @ weight).relu().cumsum(1).sum(1) / 1000, x)
    after = in_half(before, torch.float16)
    assert error(run(before, x), run(after, x)) < 1e-6
    assert dtypes(after, aten.cumsum.default) == [[torch.float16]]
    assert counts(after)["_to_copy"] == 1


def test_numbers_made_of_integers_and_angles_stay_in_float32() -> None:
    frequency = torch.logspace(0, -4, 8)

    def model(position: Tensor, x: Tensor) -> Tensor:
        angle = torch.bmm(frequency[None, :, None], position[:, None].float()).transpose(1, 2)
        return (x * angle.cos() + x * angle.sin()) @ torch.eye(8)

    inputs = torch.tensor([[1, 40, 1999]]), torch.randn(1, 3, 8)
    before = record(model, *inputs)
    for dtype in HALVES:
        after = in_half(before, dtype)
        assert error(run(before, *inputs), run(after, *inputs)) <= bound_of(dtype)
        assert dtypes(after, aten.cos.default) == [[torch.float32]]


def test_positions_in_images_stay_in_float32() -> None:
    image, positions = torch.arange(4096.0).reshape(1, 1, 1, 4096), torch.rand(1, 1, 50, 2) * 2 - 1

    def model(image: Tensor, positions: Tensor) -> Tensor:
        return nn.functional.grid_sample(image * 2, positions, align_corners=True).relu() @ torch.eye(50)

    before = record(model, image, positions)
    for dtype in HALVES:
        after = in_half(before, dtype)
        assert [read[1] for read in dtypes(after, aten.grid_sampler_2d.default)] == [torch.float32]
        assert error(run(before, image, positions), run(after, image, positions)) <= bound_of(dtype)


def test_float32_that_the_author_asks_for() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.softmax((x.float() * 2).exp(), -1).half() @ torch.eye(6).half()

    x = torch.randn(3, 6).half()
    before = record(model, x)
    assert rewritten(before, lambda module: cast(module, torch.float16)).code == before.code


def _attention(x: Tensor, bias: Tensor | None, fill: Callable[[Tensor], Tensor] = lambda scores: scores) -> Tensor:
    heads = x.reshape(2, 6, 2, 4).transpose(1, 2)
    scores = heads @ heads.transpose(2, 3)
    scores = fill(scores) if bias is None else scores + bias
    return torch.softmax(scores, -1) @ heads


HIDDEN = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]])  # the second sees nothing: still no NaN
CONSTANT = torch.where(HIDDEN.bool(), LOWEST, 0.0)[:, None, None]
MASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "of integers": lambda x, keep, _: _attention(x, (1.0 - keep[:, None, None].float()) * LOWEST),
    "of floats": lambda x, keep, _: _attention(x, keep[:, None, None].float().sub(1) * -LOWEST),
    "of bools": lambda x, keep, _: _attention(x, (keep == 0)[:, None, None].float() * -1e9),
    "as an input": lambda x, _, bias: _attention(x, bias[:, None, None]),
    "as an input, expanded": lambda x, _, bias: _attention(x, bias[:, None, None].expand(2, 2, 6, 6)),
    "constant": lambda x, _, __: _attention(x, CONSTANT),
    "twice": lambda x, _, bias: _attention(x, bias[:, None, None] / 2 + CONSTANT / 2),
    "filled in": lambda x, keep, _: _attention(
        x, None, lambda scores: scores.masked_fill((keep == 0)[:, None, None], LOWEST)
    ),
    "chosen": lambda x, keep, _: _attention(
        x, None, lambda scores: torch.where((keep != 0)[:, None, None], scores, torch.tensor(LOWEST))
    ),
    "of torch's attention": lambda x, _, bias: torch.nn.functional.scaled_dot_product_attention(
        x.reshape(2, 1, 6, 8), x.reshape(2, 1, 6, 8), x.reshape(2, 1, 6, 8), bias[:, None, None].expand(2, 1, 6, 6)
    ),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", MASKS)
def test_masks_beyond_the_range(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    inputs = x, 1 - HIDDEN, HIDDEN * LOWEST
    before = record(MASKS[kind], *inputs)
    after = in_half(before, dtype)
    (wanted,), (got,) = run(before, *inputs), run(after, *inputs)
    seen = slice(0, 1)  # scores of a row that sees nothing are lost in float32's lowest; here they are not
    assert error([wanted[seen]], [got[seen]]) <= 2 * bound_of(dtype)
    assert got.isfinite().all()
    operators = aten._softmax.default, aten.scaled_dot_product_attention.default
    assert [{*call} for operator in operators for call in dtypes(after, operator)] == [{dtype}]


def test_infinite_masks_stay_infinite() -> None:
    mask = torch.full((6, 6), -torch.inf).triu(1)
    after = in_half(record(lambda x: torch.softmax(x @ x.t() + mask, -1), torch.randn(6, 4)), torch.float16)
    (constant,) = [getattr(after, node.target) for node in after.graph.nodes if node.op == "get_attr"]
    assert torch.equal(constant, mask.half())


def test_large_numbers_that_are_no_masks() -> None:
    x = torch.tensor([1e-3, -2e-2, 5.0])
    before = record(lambda x: [x.relu() * 1e6 / 1e6, x.relu().clamp(-1e9, 1e9), x.relu() / 1e5 * 2e5], x)
    after = in_half(before, torch.float16)
    assert error(run(before, x), run(after, x)) <= bound_of(torch.float16)


def test_batch_norms_keep_their_statistics_and_are_folded() -> None:
    torch.manual_seed(0)
    module = randomize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).eval()
    x = torch.randn(1, 3, 8, 8)
    before = trace(module, (x,)).module
    after = in_half(before, torch.float16)
    norms = dtypes(after, aten._native_batch_norm_legit_no_training.default)
    assert norms == [[torch.float16, *[torch.float32] * 4]]
    whole = optimize(after, device="cpu")
    assert counts(whole) == {"_to_copy": 2, "convolution": 1, "relu": 1}
    assert error(run(before, x), run(whole, x)) <= bound_of(torch.float16)


def test_an_output_that_is_an_input_is_not_rounded() -> None:
    x = torch.randn(4, 4)
    after = in_half(record(lambda x: [x.t().reshape(-1), x @ x], x), torch.float16)
    assert torch.equal(run(after, x)[0], x.t().reshape(-1))


def test_single_calls_take_the_input_itself() -> None:
    after = in_half(record(lambda x: x.reshape(8, 2).exp(), torch.randn(4, 4)), torch.float16)
    assert counts(after) == {"reshape": 1, "exp": 1}


def test_complex_numbers_and_float64_stay() -> None:
    table = torch.randn(4, dtype=torch.float64)

    def model(x: Tensor) -> list[Tensor]:
        return [torch.fft.irfft(torch.fft.rfft(x.relu()) * 2), (x.relu() + table).sum(1), (x.double() * table).float()]

    x = torch.randn(3, 4)
    before = record(model, x)
    after = in_half(before, torch.bfloat16)
    assert error(run(before, x), run(after, x)) <= bound_of(torch.bfloat16)
    assert dtypes(after, aten._fft_r2c.default) == [[torch.float32]]


def test_call_without_kernel_stays_float32() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool3d(x.relu(), 2).relu()  # on the CPU

    x = torch.randn(1, 2, 4, 4, 4)
    after = in_half(record(model, x), torch.float16)
    assert dtypes(after, aten.avg_pool3d.default) == [[torch.float32]]
    assert dtypes(after, aten.relu.default) == [[torch.float16]] * 2


def test_a_call_that_takes_no_precision_is_refused() -> None:
    graph = record(lambda x: x @ torch.ones(4, 3), torch.randn(2, 4))
    (call,) = [node for node in graph.graph.nodes if node.target is aten.mm.default]
    call.args = call.args[::-1]
    call.meta["source"] = "head"
    with pytest.raises(UnsupportedModelError, match=r"aten\.mm\.default in head supports neither .*16 nor float32"):
        cast(graph, torch.float16)


Step = Callable[[Tensor, Tensor, Tensor], Tensor]
TABLE = torch.linspace(-1, 1, 36).reshape(6, 6)
STEPS: tuple[Step, ...] = (
    lambda x, y, _: x + y,
    lambda x, y, _: x * y,
    lambda x, y, _: torch.cat([x[:3], y[3:]]),
    lambda x, y, n: torch.where(n > 2, x, y),
    lambda x, _, n: x * n,
    lambda x, _, n: torch.cos(n * 0.1 + TABLE) + x,
    lambda x, _, n: TABLE[n] + x,
    lambda x, _, n: x.masked_fill(n == 1, -1e9).softmax(-1),
    lambda x, _, n: (1 - (n > 2).float()) * LOWEST + x.sigmoid(),
    lambda x, _, n: x.index_put((n,), TABLE[0]),
    lambda x, y, _: x.tanh().pow(2).sum(-1, keepdim=True) + y,
    lambda x, _, __: x.tanh().exp(),
    lambda x, _, __: x.sigmoid().log(),
    lambda x, _, __: (x.abs() + 1).rsqrt(),
    lambda x, _, __: (x.abs() + 1).reciprocal(),
    lambda x, _, __: x.mean(0, keepdim=True).expand(6, 6),
    lambda x, _, __: x.cumsum(0),
    lambda x, y, _: x - y.amax(1, keepdim=True),
    lambda x, _, __: torch.var_mean(x, 1, keepdim=True)[0] + x,
    lambda x, _, __: torch.layer_norm(x, [6], TABLE[0], TABLE[1]),
    lambda x, _, __: torch.log_softmax(x, 1),
    lambda x, y, _: x @ y / 6,
    lambda x, _, __: torch.addmm(TABLE[2], x, TABLE),
    lambda x, _, __: torch.nn.functional.softplus(x) * x.norm(),
    lambda x, y, _: torch.stack([x, y]).amax(0),
    lambda x, _, __: x.t().reshape(4, 9).clone().reshape(6, 6),
    lambda x, _, __: x * torch.tensor(0.3) + 1,
    lambda x, _, __: torch.round(x * 10) / 10,
    lambda x, _, __: (x * 3).to(torch.int64).clamp(-9, 9).float(),
    lambda x, _, __: x.double().mul(2).float(),
    lambda x, _, __: x.half().float(),
    lambda x, y, _: x.split(3)[1].repeat(2, 1) * y.topk(6, 1)[0],
)


@pytest.mark.parametrize("dtype", HALVES)
@examples(40)
@given(data=st.data())
def test_any_network_runs_in_its_dtypes(dtype: torch.dtype, data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=9))
    reads = [(data.draw(st.integers(max(0, i - 1), i)), data.draw(st.integers(0, i))) for i in range(len(steps))]

    def model(x: Tensor, y: Tensor, n: Tensor) -> list[Tensor]:
        values = [x, y]
        for step, (first, second) in zip(steps, reads, strict=True):
            values.append(step(values[first + 1], values[second], n))
        return [values[-1], values[len(values) // 2].clone()]

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 6, generator=generator), torch.randn(6, 6, generator=generator), torch.arange(6)
    run(in_half(record(model, *inputs), dtype), *inputs)
