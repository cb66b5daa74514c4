"""Attention written out, in the forms that exports and models use, as scaled_dot_product_attention."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import assert_same, checked, counts, record, rewritten, run
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention as attention

from nimblec.graph.simplify import simplify
from nimblec.optimize.passes.attention import fuse_attention
from nimblec.optimize.passes.attention_masks import ALIGNMENT, canonicalize_masks
from nimblec.optimize.passes.folding import fold_constants
from nimblec.optimize.passes.subexpressions import merge_equal_calls

BATCH, HEADS, TOKENS, SIZE = 2, 3, 5, 8
FUSED = "scaled_dot_product_attention"


def _inputs(seed: int = 0, keys: int = TOKENS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (TOKENS, keys, keys)
    return [torch.randn(BATCH, n, HEADS * SIZE, generator=generator) for n in lengths]


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(BATCH, TOKENS, HEADS * SIZE)


def _rewritten(before: fx.GraphModule) -> fx.GraphModule:
    return rewritten(before, simplify, merge_equal_calls, fuse_attention, simplify)


@examples(40)
@given(
    keys=st.sampled_from([TOKENS, 7]),
    scale=st.sampled_from(["none", "scores", "divided", "queries", "both", "heads"]),
    mask=st.sampled_from(["none", "input", "rows", "causal", "bias", "two", "where", "filled"]),
    flat=st.booleans(),
)
def test_any_form(*, keys: int, scale: str, mask: str, flat: bool) -> None:
    inputs = _inputs(keys=keys)
    given_mask = torch.where(torch.rand(BATCH, 1, 1, keys, generator=torch.Generator().manual_seed(1)) < 0.5, 0.0, -9e3)
    hidden = torch.ones(TOKENS, keys, dtype=torch.bool).triu(1)
    causal = torch.zeros(TOKENS, keys).masked_fill(hidden, torch.finfo(torch.float32).min)
    bias = torch.randn(1, HEADS, TOKENS, keys, generator=torch.Generator().manual_seed(2))

    def masked(scores: Tensor, given_mask: Tensor) -> Tensor:
        return {
            "none": lambda: scores,
            "input": lambda: scores + given_mask,
            "rows": lambda: given_mask[:1].expand(1, 1, TOKENS, keys) + scores,
            "causal": lambda: scores + causal,
            "bias": lambda: scores + bias,
            "two": lambda: scores + causal + given_mask,
            "where": lambda: torch.where(~hidden, scores, torch.tensor(-1e9)),
            "filled": lambda: scores.masked_fill(hidden, -torch.inf),
        }[mask]()

    def model(q: Tensor, k: Tensor, v: Tensor, given_mask: Tensor) -> Tensor:
        q, k, v = _heads(q), _heads(k), _heads(v)
        root = SIZE**-0.25
        q = {"queries": q * 0.3, "both": q * root}.get(scale, q)
        k = k.transpose(2, 3) * root if scale == "both" else k.transpose(-1, -2)
        scores = q @ k
        of_heads = torch.arange(1.0, HEADS + 1).reshape(HEADS, 1, 1)
        scaled = {"scores": scores * 0.2, "divided": scores / math.sqrt(SIZE), "heads": scores * of_heads}
        weights = torch.softmax(masked(scaled.get(scale, scores), given_mask), 3 if flat else -1)
        return _joined(weights @ v)

    before = record(model, *inputs, given_mask)
    after = _rewritten(before)
    names = counts(after)
    assert names[FUSED] == 1
    assert not names.keys() & {"bmm", "_softmax", "where", "masked_fill"}
    (call,) = (n for n in after.graph.nodes if FUSED in str(n.target))
    causal_only = mask in ("causal", "where", "filled") and keys == TOKENS
    assert call.args[3:6] == (None, 0.0, True) if causal_only else call.args[5] is False
    assert (call.args[3] is None) == (causal_only or mask == "none")
    assert_same(before, after, *inputs, given_mask, rtol=1e-5)


def test_nothing_but_views_is_left_around_it() -> None:
    before = record(lambda q, k, v: _joined(torch.softmax(_heads(q) @ _heads(k).mT, -1) @ _heads(v)), *_inputs())
    after = _rewritten(before)
    names = counts(after)
    assert names == {FUSED: 1, "reshape": 4, "transpose": names["transpose"], "permute": names["permute"]}
    assert names["transpose"] + names["permute"] == 4


def test_heads_without_a_batch() -> None:
    q, k, v = (torch.randn(HEADS, TOKENS, SIZE, generator=torch.Generator().manual_seed(n)) for n in range(3))
    before = record(lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q, k.mT) * 0.5, 2), v), q, k, v)
    after = _rewritten(before)
    assert counts(after)[FUSED] == 1
    assert_same(before, after, q, k, v, rtol=1e-5)


@pytest.mark.parametrize("bias", [(HEADS, TOKENS, TOKENS), (1, 1, HEADS, TOKENS, TOKENS), (2, 2, 1, TOKENS, TOKENS)])
def test_windows(bias: tuple[int, ...]) -> None:
    """As in MaxViT (Tu et al. 2022): heads of windows of images, a bias, and a factor before the keys are laid out."""
    q, k, v = (torch.randn(2, 2, TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(n)) for n in range(3))
    added = torch.randn(bias, generator=torch.Generator().manual_seed(3))

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(2, 3) for x in (q, k, v))
        weights = torch.softmax(torch.einsum("bghid,bghjd->bghij", q, k * 0.3) + added, -1)
        return torch.einsum("bghij,bghjd->bghid", weights, v)

    after = _rewritten(record(model, q, k, v))
    assert counts(after)[FUSED] == 1
    assert not {"mul", "bmm"} & counts(after).keys()
    torch.testing.assert_close(run(after, q, k, v)[0], model(q, k, v))


@pytest.mark.parametrize("mask", [None, (TOKENS, TOKENS), (1, 1, 3, 1, TOKENS), (2, 1, 1, TOKENS, TOKENS)], ids=str)
def test_attention_gets_four_axes(mask: tuple[int, ...] | None) -> None:
    """As in Hiera (Ryali et al. 2023), where a model calls it on heads of windows."""
    added = None if mask is None else torch.randn(mask, generator=torch.Generator().manual_seed(3))
    for leading in [(2, 4, 3)] if added is not None and added.dim() == 5 else [(2, 4, 3), (3,), ()]:
        q, k, v = (torch.randn(*leading, TOKENS, SIZE, generator=torch.Generator().manual_seed(n)) for n in range(3))
        before = record(lambda q, k, v: attention(q, k, v, added), q, k, v)
        after = rewritten(before, fuse_attention)
        (call,) = (node for node in after.graph.nodes if FUSED in str(node.target))
        heads = leading[-1:] or (1,)
        assert call.meta["val"].shape == (math.prod(leading[:-1]), *heads, TOKENS, SIZE)
        assert_same(before, after, q, k, v, rtol=1e-5)


def test_a_bias_of_some_axes_of_the_batch_stays() -> None:
    q, bias = torch.randn(2, 2, HEADS, TOKENS, SIZE), torch.randn(2, 1, 1, TOKENS, TOKENS)
    assert FUSED not in counts(_rewritten(record(lambda q: torch.softmax(q @ q.mT + bias, -1) @ q, q)))


def test_positions_of_rows_and_columns() -> None:
    """As in MViTv2 (Li et al. 2022) and SAM: added where queries and keys have two axes each."""
    q, k, v = (torch.randn(BATCH, HEADS, n, SIZE, generator=torch.Generator().manual_seed(n)) for n in (6, 4, 4))
    down, across = torch.randn(SIZE, 2), torch.randn(SIZE, 2)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.view(BATCH, HEADS, 2, 3, SIZE)
        scores = (q * 0.5) @ k.mT
        split = scores.view(BATCH, HEADS, 2, 3, 2, 2)
        summed = split + (rows @ down).unsqueeze(-1) + (rows @ across).unsqueeze(-2)
        written = torch.ops.aten.copy(scores, summed.view(BATCH, HEADS, 6, 4))
        return torch.softmax(written, -1) @ v

    after = _rewritten(record(model, q, k, v))
    assert counts(after)[FUSED] == 1
    assert "copy" not in counts(after)
    torch.testing.assert_close(run(after, q, k, v)[0], model(q, k, v))


@pytest.mark.parametrize("added", [torch.zeros(1, 1, 1), torch.randn(HEADS, 1, TOKENS)])
def test_scores_added_to_a_bias_by_one_call(added: Tensor) -> None:
    q, k, v = (torch.randn(HEADS, TOKENS, SIZE, generator=torch.Generator().manual_seed(n)) for n in range(3))
    before = record(lambda q, k, v: torch.baddbmm(added, q, k.mT, alpha=0.3).softmax(-1) @ v, q, k, v)
    after = _rewritten(before)
    (call,) = (n for n in after.graph.nodes if FUSED in str(n.target))
    assert (call.args[3] is None) != bool(added.any())
    assert_same(before, after, q, k, v, rtol=1e-5)


@pytest.mark.parametrize("how", [{"beta": 2}, {}])
def test_other_sums_of_products_stay(how: dict[str, int]) -> None:
    q = torch.randn(HEADS, TOKENS, SIZE)
    after = _rewritten(record(lambda q: torch.baddbmm(torch.ones(1), q, q.mT, **how).exp(), q))
    assert counts(after)["baddbmm"] == 1


def test_a_softmax_in_single_precision_of_half_scores() -> None:
    inputs = [t.half() for t in _inputs()]

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = _heads(q) @ _heads(k).mT
        return _joined(torch.softmax(scores.float(), -1).half() @ _heads(v))

    before = record(model, *inputs)
    after = _rewritten(before)
    assert counts(after)[FUSED] == 1
    assert_same(before, after, *inputs, rtol=5e-3)


def _weights_read_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v + weights.sum()


def _scores_read_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ v + scores.sum()


LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
ALL = torch.ones(TOKENS, TOKENS, dtype=torch.bool)


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v,
        lambda q, k, v: torch.softmax((q @ k.mT + q[:, :, :, :1]) * 0.5, -1) @ v,  # the mask is scaled too
        lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(ALL, -torch.inf), -1) @ v,
        lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(LATER, 0.5), -1) @ v,  # nothing hidden
        lambda q, k, v: torch.softmax(torch.where(q[:, :, :, :1] > 0, q @ k.mT, -1e9), -1) @ v,  # not known
        lambda q, k, v: torch.softmax(torch.relu(q @ k.mT), -1) @ v,
        lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(LATER, -1e9).masked_fill(LATER.T, -1e9), -1) @ v,
        lambda q, k, v: torch.softmax(torch.where(~LATER, (q @ k.mT).masked_fill(LATER.T, -1e9), -1e9), -1) @ v,
        lambda q, k, v: torch.softmax((q @ k.mT * -0.3).masked_fill(LATER, -torch.inf), -1) @ v,  # which were infinity
        lambda q, k, v: torch.softmax((q @ k.mT * 0.0).masked_fill(LATER, -torch.inf), -1) @ v,
        _weights_read_again,
        _scores_read_again,
        lambda q, k, v: torch.softmax(q[..., :3] @ k[..., :3].mT, -1) @ v,  # no kernel takes 3 channels
        lambda q, k, v: torch.softmax(q.double() @ k.double().mT, -1) @ v.double(),
    ],
)
def test_what_only_looks_like_attention_stays(attend: Callable[..., Tensor]) -> None:
    before = record(lambda q, k, v: attend(_heads(q), _heads(k), _heads(v)), *_inputs())
    after = _rewritten(before)
    assert counts(after)[FUSED] == 0
    assert counts(after)["bmm"] == 2


SOME = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.5
SOME[:, 0] = True
SOME[:, 1] = False
LOW = torch.finfo(torch.float32).min


def _stated(mask: Tensor, passes: Sequence[Callable[[fx.GraphModule], None]] = (), keys: int = TOKENS) -> fx.Node:
    """Return the call that is left of an attention with a constant mask; its values must be the same."""
    inputs = _inputs(keys=keys)
    shape = (BATCH, HEADS, TOKENS, keys)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        expanded = mask.unsqueeze(0).expand(shape) if mask.dim() < 4 else mask[:, :, :, :keys]
        return _joined(attention(_heads(q), _heads(k), _heads(v), expanded, scale=0.3))

    after = checked(model, inputs, *passes, canonicalize_masks, rtol=1e-5)
    assert not counts(after).keys() & {"expand", "unsqueeze", "slice"}
    (call,) = (n for n in after.graph.nodes if FUSED in str(n.target))
    assert call.kwargs == {"scale": 0.3}
    return call


@pytest.mark.parametrize("passes", [(), (fold_constants,)])
@pytest.mark.parametrize("mask", [ALL, ALL[:1], ~ALL * 1.0, ALL.expand(1, 1, TOKENS, TOKENS)])
def test_a_mask_that_hides_nothing_goes(mask: Tensor, passes: tuple[Callable[..., None], ...]) -> None:
    assert _stated(mask, passes).args[3:] == (None, 0.0, False)


@pytest.mark.parametrize("passes", [(), (fold_constants,)])
@pytest.mark.parametrize("mask", [~LATER, LATER * LOW, torch.zeros(1, TOKENS, TOKENS).masked_fill(LATER, -torch.inf)])
def test_a_causal_mask_becomes_a_flag(mask: Tensor, passes: tuple[Callable[..., None], ...]) -> None:
    assert _stated(mask, passes).args[3:] == (None, 0.0, True)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_causal_mask_of_scores_whose_signs_change_is_no_flag(scale: float) -> None:
    before = record(lambda q, k, v: attention(_heads(q), _heads(k), _heads(v), ~LATER, scale=scale), *_inputs())
    assert_same(before, rewritten(before, canonicalize_masks), *_inputs(), rtol=1e-5)


@pytest.mark.parametrize("mask", [SOME, SOME[:1], SOME.expand(HEADS, TOKENS, TOKENS), ~LATER.T])
def test_another_boolean_mask_is_added(mask: Tensor) -> None:
    call = _stated(mask, keys=TOKENS)
    assert call.args[4:] == (0.0, False)
    value = call.args[3].meta["val"]
    assert (value.dtype, value.numel() <= TOKENS * TOKENS) == (torch.float32, True)
    assert all(stride % ALIGNMENT == 0 for stride in value.stride()[:-1])


def test_a_causal_mask_of_more_keys_than_queries_is_added() -> None:
    later = torch.ones(TOKENS, 7, dtype=torch.bool).tril()
    call = _stated(later, keys=7)
    assert call.args[3] is not None
    assert call.args[5] is False


def test_masks_that_say_more_stay() -> None:
    bias = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(4))
    assert _stated(bias[None, None]).args[3].meta["val"].shape == (1, 1, TOKENS, TOKENS)
    nothing_left = LATER.clone()  # for the last query

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = _heads(q), _heads(k), _heads(v)
        return attention(q, k, v, mask), attention(q, k, v, nothing_left)

    before = record(model, *_inputs(), ~LATER)
    after = rewritten(before, canonicalize_masks)
    masks = [n.args[3].meta["val"].dtype for n in after.graph.nodes if FUSED in str(n.target)]
    assert masks == [torch.bool, torch.bool]


def test_a_mask_of_an_empty_batch() -> None:
    inputs = [torch.zeros(0, HEADS, TOKENS, SIZE) for _ in range(3)]
    before = record(lambda q, k, v: attention(q, k, v, SOME.expand(0, 1, TOKENS, TOKENS).clone()), *inputs)
    (result,) = run(rewritten(before, canonicalize_masks), *inputs)
    assert result.shape == inputs[0].shape


def test_a_mask_of_a_deep_network_is_computed_once() -> None:
    def model(x: Tensor) -> Tensor:
        mask = x @ x.mT
        for _ in range(60):
            mask = mask + mask.sin()
        return attention(x, x, x, mask)

    assert counts(rewritten(record(model, torch.randn(1, 2, TOKENS, SIZE)), canonicalize_masks))[FUSED] == 1


def test_layers_share_one_added_mask() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            q = attention(q, k, v, SOME)
        return q

    inputs = [_heads(t).clone() for t in _inputs()]
    after = checked(model, inputs, merge_equal_calls, canonicalize_masks, rtol=1e-5)
    assert sum(n.op == "get_attr" for n in after.graph.nodes) == 1
