"""Linears: activations as their epilogue, several on one input as one product, activations written out."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from rewriting import assert_same, checked, counts, optimize, record, rewritten
from torch import Tensor, fx

from nimblec.optimize.passes import aligned_weights
from nimblec.optimize.passes.activations import fuse_activations
from nimblec.optimize.passes.aligned_weights import align_weights
from nimblec.optimize.passes.folding import fold_constants
from nimblec.optimize.passes.linears import join_linears
from nimblec.optimize.passes.subexpressions import merge_equal_calls
from nimblec.optimize.passes.written_activations import recognize_activations

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 8, generator=GENERATOR)
WEIGHTS = [torch.randn(n, 8, generator=GENERATOR) for n in (4, 12, 5)]
BIASES = [torch.randn(n, generator=GENERATOR) for n in (4, 12, 5)]


@pytest.mark.parametrize(
    "activation", [torch.relu, lambda y: F.gelu(y, approximate="tanh"), lambda y: torch.clamp_min(y, 0)]
)
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_an_activation_becomes_the_epilogue(activation: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    x = X.reshape(shape)
    after = checked(lambda x: activation(F.linear(x, WEIGHTS[0], BIASES[0])), x, fuse_activations)
    names = counts(after)
    assert names["_addmm_activation"] == 1
    assert not names.keys() & {"addmm", "relu", "gelu", "clamp_min"}


def _read_again(x: Tensor) -> Tensor:
    y = F.linear(x, WEIGHTS[0], BIASES[0])
    return torch.relu(y) + y


@pytest.mark.parametrize(
    "model",
    [
        lambda x: F.gelu(F.linear(x, WEIGHTS[0], BIASES[0])),  # by erf: the epilogue is by tanh
        lambda x: torch.relu(torch.addmm(BIASES[0], x, WEIGHTS[0].t(), beta=2)),
        lambda x: torch.relu(torch.addmm(x[:, :4], x, WEIGHTS[0].t())),
        _read_again,
        lambda x: torch.relu(torch.mm(x, WEIGHTS[0].t())),
    ],
)
def test_what_the_epilogue_cannot_say_stays(model: Callable[[Tensor], Tensor]) -> None:
    assert counts(rewritten(record(model, X), fuse_activations))["_addmm_activation"] == 0


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_linears_on_one_input_become_one_product(with_bias: bool, transposed: bool) -> None:
    weights = [w.t() if transposed else w.t().contiguous() for w in WEIGHTS]

    def model(x: Tensor) -> tuple[Tensor, ...]:
        results = [torch.addmm(b, x, w) if with_bias else torch.mm(x, w) for b, w in zip(BIASES, weights, strict=True)]
        return tuple(torch.tanh(y.reshape(2, 3, -1)) for y in results)

    after = checked(model, X, join_linears)
    assert counts(after) == {"addmm" if with_bias else "mm": 1, "slice": 3, "reshape": 3, "tanh": 3}
    (weight,) = (t for t in after.buffers() if t.dim() == 2)
    assert weight.shape == (8, 21)
    assert weight.stride() == ((1, 8) if transposed else (21, 1))


def test_linears_that_differ_in_kind_stay_apart() -> None:
    tied = WEIGHTS[0].t()

    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x)
        return (
            torch.mm(x, WEIGHTS[1].t()),
            torch.mm(y, WEIGHTS[2].t()),  # another input
            torch.addmm(BIASES[2], x, WEIGHTS[2].t()),  # with a bias
            torch.addmm(BIASES[1], x, WEIGHTS[1].t(), alpha=2),
            torch.mm(x, tied) * 2,  # weights that another call reads too
            torch.mm(y, tied),
            torch.mm(x, y.t()),  # no constant
        )

    before = record(model, X)
    assert counts(rewritten(before, join_linears)) == counts(before)


def test_linears_whose_strides_a_call_sees_stay_apart() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        first, second = (torch.mm(x, weight.t()) for weight in WEIGHTS[:2])
        return first, second.as_strided((4, 18), (18, 1))

    assert counts(checked(model, X, join_linears))["mm"] == 2


def _erf_first(x: Tensor) -> Tensor:
    return ((torch.erf(x * torch.tensor(math.sqrt(0.5))) + torch.tensor(1.0)) * x) * torch.tensor(0.5)


def _half_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "half by erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "erf first": _erf_first,
    "half by tanh": _half_by_tanh,
    "cube by products": lambda x: x * (torch.tanh((x * x * x * 0.044715 + x) * 0.7978845608028654) + 1) * 0.5,
}


@pytest.mark.parametrize("written", FORMS.values(), ids=FORMS)
def test_gelu_is_recognized(written: Callable[[Tensor], Tensor]) -> None:
    after = checked(lambda x: written(torch.tanh(x) * 3), X, recognize_activations)
    assert counts(after) == {"tanh": 1, "mul": 1, "gelu": 1}


def test_silu_is_recognized() -> None:
    after = checked(lambda x: torch.sigmoid(torch.tanh(x)) * torch.tanh(x), X, merge_equal_calls, recognize_activations)
    assert counts(after) == {"tanh": 1, "silu": 1}


def test_linears_take_the_factors_of_a_silu() -> None:
    """As in CLIP, whose activation is ``x sigmoid(1.702 x)``; the linear after it sees it through a view."""
    weights = torch.randn(6, 8, generator=GENERATOR), torch.randn(4, 6, generator=GENERATOR)

    def model(x: Tensor) -> Tensor:
        y = F.linear(x.reshape(1, *x.shape), weights[0])
        return torch.addmm(weights[1][:, 0], (y * torch.sigmoid(y * 1.702)).flatten(0, 1), weights[1].t())

    before = record(model, X)
    after = optimize(before, device="cpu")
    assert counts(after)["silu"] == 1
    assert not {"mul", "sigmoid"} & counts(after).keys()
    assert_same(before, after, X, rtol=1e-5)


@pytest.mark.parametrize(
    "written",
    [
        lambda x: x * torch.sigmoid(x + 1),
        lambda x: x * torch.sigmoid(x * -1.702),
        lambda x: x * torch.sigmoid(X),
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(3.0))),
        lambda x: x * 0.5 * (2.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: x * 0.25 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: X * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: (x + 1.0) * True,
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.05 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 2.0)))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x * 2 + 0.044715 * torch.pow(x, 3.0)))),
    ],
)
def test_what_only_looks_like_an_activation_stays(written: Callable[[Tensor], Tensor]) -> None:
    before = record(written, X)
    assert counts(rewritten(before, recognize_activations)) == counts(before)


def test_a_factor_of_more_axes_keeps_its_own() -> None:
    half = torch.full((1, 1), 0.5)
    before = record(lambda x: x * half * (1.0 + torch.erf(x / math.sqrt(2.0))), X[0])
    assert counts(rewritten(before, recognize_activations)) == counts(before)


@pytest.fixture
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_weights, "LARGE", 1)


def _half(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half() / 4


def _linears(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.target in aligned_weights.LINEARS]


def _nbytes(module: fx.GraphModule) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.buffers()}.values())


@pytest.mark.usefixtures("_small_is_large")
@pytest.mark.parametrize("outputs", [13, 16])
@pytest.mark.parametrize("inputs", [8, 11])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("kind", ["mm", "addmm", "relu", "linear"])
def test_weights_are_padded_to_multiples_of_eight(outputs: int, inputs: int, transposed: bool, kind: str) -> None:
    weight, bias = _half(outputs, inputs), _half(outputs)
    matrix = weight.t() if transposed else weight.t().contiguous()

    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = {
            "mm": lambda: torch.mm(x, matrix),
            "addmm": lambda: torch.addmm(bias, x, matrix),
            "relu": lambda: torch.ops.aten._addmm_activation(bias, x, matrix),
            "linear": lambda: torch.ops.aten.linear.default(x, weight, bias),
        }[kind]()
        return y.reshape(2, 3, outputs), torch.tanh(y), y.t()

    x = _half(6, inputs)
    before = record(model, x)
    after = rewritten(before, align_weights)
    (call,) = _linears(after)
    (rows,) = (n.meta["val"] for n in call.all_input_nodes if n.op != "get_attr")
    shapes = {tuple(t.shape) for t in after.buffers()}
    assert call.meta["val"].shape[1] % 8 == rows.shape[1] % 8 == 0
    assert all(length % 8 == 0 for shape in shapes for length in shape)
    names = counts(after)
    assert (names["slice"], names["constant_pad_nd"]) == (int(outputs == 13), int(inputs == 11))
    for wanted, got in zip(before(x), after(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("_small_is_large")
def test_a_weight_that_is_an_embedding_too_is_stored_once() -> None:
    words = _half(13, 8)

    def model(tokens: Tensor) -> tuple[Tensor, ...]:
        x = F.embedding(tokens, words) + words[3]
        return torch.mm(x, words.t()), torch.mm(x * 2, words.t()).reshape(2, 3, 13), words[3:].sum(1)

    tokens = torch.tensor([0, 12, 3, 5, 7, 12])
    before = record(model, tokens)
    after = optimize(before, device="cuda")
    assert _nbytes(after) == 16 * 8 * 2 + 10 * 2  # and the sum, which is folded
    assert [n.meta["val"].shape[1] for n in _linears(after)] == [16, 16]
    assert counts(after)["clone"] == 3  # outputs as dense as they were; the folded one is a copy too
    assert_same(before, after, tokens)


@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs"),
    [(torch.float32, 1025, 1024), (torch.float16, 1032, 1024), (torch.bfloat16, 1021, 1024)],
)
def test_other_weights_stay(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight = torch.zeros(outputs, inputs, dtype=dtype)
    before = record(lambda x: torch.mm(x, weight.t()), torch.zeros(2, inputs, dtype=dtype))
    assert counts(rewritten(before, fold_constants, align_weights)) == {"mm": 1}
