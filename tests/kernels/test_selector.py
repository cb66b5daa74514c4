"""The choice of a tiling by time, which is the same for every family of kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from choosing import selector
from rewriting import counts, optimize, random_half, record
from torch import Tensor, fx
from torch.nn import functional

from nimblec.kernels.gpu import SM_90
from nimblec.kernels.products.gemm_rewrite import GEMM
from nimblec.kernels.products.recurrence_rewrite import RECURRENCE
from nimblec.kernels.reductions.attention_rewrite import ATTENTION_FAMILY
from nimblec.kernels.reductions.norm_rewrite import NORM
from nimblec.kernels.reductions.pool_rewrite import POOL
from nimblec.kernels.selector import FRAMEWORK, Family

IMAGES, ROWS, HEADS = random_half(2, 16, 8, 8), random_half(2, 5, 48), random_half(1, 2, 8, 16)
WEIGHT, MATRIX = random_half(16, 16, 3, 3) / 12, random_half(48, 48) / 7
STEPS, RECURRENT = random_half(5, 2, 16), [random_half(64, 16) / 4, random_half(64, 16) / 4]


def _conv(x: Tensor) -> Tensor:
    return functional.conv2d(x, WEIGHT, padding=1)


def _lstm(x: Tensor) -> Tensor:
    state = torch.zeros(1, 2, 16, dtype=torch.half)
    return torch.lstm(x, [state, state], RECURRENT, False, 1, 0.0, False, False, False)[0]


FAMILIES: dict[str, tuple[Family[Any, Any], Callable[[Tensor], Tensor], Tensor]] = {
    "attention": (ATTENTION_FAMILY, lambda x: functional.scaled_dot_product_attention(x, x, x), HEADS),
    "convolutions": (GEMM, _conv, IMAGES),
    "depthwise": (GEMM, lambda x: functional.conv2d(x, WEIGHT[:, :1], groups=16), IMAGES),
    "norms": (NORM, lambda x: functional.linear(functional.layer_norm(x @ MATRIX, (48,)), MATRIX), ROWS),
    "pools": (POOL, lambda x: _conv(functional.max_pool2d(_conv(x), 3, 2, 1)), IMAGES),
    "recurrences": (RECURRENCE, _lstm, STEPS),
}
of_each_family = pytest.mark.parametrize(("family", "model", "x"), FAMILIES.values(), ids=FAMILIES)


def _graph(model: Callable[[Tensor], Tensor], x: Tensor) -> fx.GraphModule:
    return optimize(record(model, x), device="cuda")


@of_each_family
def test_selector_keeps_the_fastest_tiling(family: Family[Any, Any], model: Any, x: Tensor) -> None:
    (request,) = family.requests(_graph(model, x))
    choose, jobs = selector(family, lambda n: {0: 3.0, 2: 1.0}.get(n, 2.0))
    choose.prepare([request, request])
    tilings = family.tilings(request, SM_90)
    assert len(jobs) == len(tilings)
    chosen = choose(request)
    choice = choose.choices[request.signature]
    is_timed = FRAMEWORK in choice.microseconds
    assert choose(request) == chosen == tilings[2 - is_timed]
    assert len(choice.microseconds) == len(tilings) + is_timed


@of_each_family
def test_selector_keeps_the_framework_where_it_is_faster(family: Family[Any, Any], model: Any, x: Tensor) -> None:
    module = _graph(model, x)
    before = counts(module)
    choose, _ = selector(family, lambda n: 1.0 + n)
    (request,) = family.requests(module)
    is_timed = choose(request) is None
    assert is_timed == (family is not NORM)
    family.use(module, lambda _: None, "none")
    assert counts(module) == before


@of_each_family
def test_selector_remembers_times(family: Family[Any, Any], model: Any, x: Tensor) -> None:
    (request,) = family.requests(_graph(model, x))
    times: dict[str, int] = {}
    first, _ = selector(family, lambda n: {0: 3.0, 2: 1.0}.get(n, 2.0), times=times)
    first.prepare([request])
    chosen = first(request)
    second, jobs = selector(family, lambda n: pytest.fail(f"timed again, {n}"), times=times)
    second.prepare([request])
    assert second(request) == chosen
    assert len(jobs) == 1
    assert second.choices == first.choices
