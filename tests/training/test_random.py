"""Random numbers of a training step: Philox as published, right in distribution, never the same twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import nimblec
import nimblert
from nimblec.base.errors import CompileError
from nimblec.pytorch.philox import philox
from nimblec.training.functions import OtherFunctions
from nimblec.training.random import Draws

MANY = 1 << 18
WORD = (1 << 32) - 1


def as_published(seed: int, counter: int) -> list[int]:
    """Philox 4x32-10 in Python's integers."""
    key, words = [seed & WORD, seed >> 32 & WORD], [counter & WORD, counter >> 32 & WORD, 0, 0]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [second >> 32 ^ words[1] ^ key[0], second & WORD, first >> 32 ^ words[3] ^ key[1], first & WORD]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return words


def test_the_words_are_philoxs() -> None:
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # kat_vectors of Random123
    assert as_published(0, 0) == known
    for seed, counter in ((0, 0), (-1, 2**40 + 5), (-(2**63), 2**63 - 1), (0x243F6A8885A308D3, 7)):
        words = philox(torch.tensor(seed), torch.tensor([counter]))
        assert [int(word) for word in words] == as_published(seed, counter)


class Shifted(nn.Module):
    """By some numbers of bits."""

    def __init__(self, *bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, x: Tensor) -> list[Tensor]:
        """Integers of any size."""
        return [*(x >> bits for bits in self.bits), *(torch.bitwise_right_shift(x, bits) for bits in self.bits)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_shifts_of_a_plan_keep_signs(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.min + 1, limits.max, limits.max - 1, 0, 1, 2, 3, *(limits.max >> n for n in range(64))]
    x = torch.tensor([*values, *(-n for n in values[8:] if limits.min < 0)]).to(dtype)
    model = Shifted(*(n for n in (0, 1, 6, 7, 30, 31, 32, 62, 63) if n < limits.bits))
    with nimblert.load(nimblec.compile(model, (x,), target="cpu")) as executable, torch.no_grad():
        for found, expected in zip(executable(x.numpy()), model(x), strict=True):
            assert (found.dtype, found.tolist()) == (expected.numpy().dtype, expected.tolist())


def draws(seed: int = 0, offset: int = 0) -> Draws:
    return Draws(torch.tensor(seed), torch.tensor(offset))


DRAWN: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(MANY), 1 / 2, 1 / 12),
    "rand_like": (lambda: torch.rand_like(torch.ones(512, 512)), 1 / 2, 1 / 12),
    "uniform_": (lambda: torch.empty(MANY).uniform_(-1, 3), 1.0, 16 / 12),
    "randn": (lambda: torch.randn(MANY), 0.0, 1.0),
    "randn_like": (lambda: torch.randn_like(torch.ones(MANY)), 0.0, 1.0),
    "normal_": (lambda: torch.empty(MANY).normal_(2, 3), 2.0, 9.0),
    "bernoulli": (lambda: torch.bernoulli(torch.full((MANY,), 0.3)), 0.3, 0.21),
    "bernoulli_": (lambda: torch.empty(MANY).bernoulli_(0.3), 0.3, 0.21),
    "a coin": (lambda: torch.full((MANY,), 0.1).bernoulli_(), 0.5, 0.25),
    "half dropped out": (lambda: nn.functional.dropout(torch.ones(MANY), 0.5), 1.0, 1.0),
    "dropout": (lambda: nn.functional.dropout(torch.ones(MANY), 0.2), 1.0, 0.25),
    "native dropout": (lambda: torch.native_dropout(torch.ones(MANY), 0.2, train=True)[0], 1.0, 0.25),
}


@pytest.mark.parametrize("name", DRAWN)
def test_mean_and_variance(name: str) -> None:
    draw, mean, variance = DRAWN[name]
    with draws(seed=5):
        found = draw().double()
    six_errors = 6 / MANY**0.5
    assert abs(float(found.mean()) - mean) < six_errors * variance**0.5
    assert abs(float(found.var()) - variance) < 3 * six_errors * variance


def test_no_number_comes_again() -> None:
    """Not in a call, not in the next one of the step, not in the next step; with another seed none comes that did."""
    numbers = []
    offset = 0
    for _ in range(3):
        with draws(seed=1, offset=offset) as step:
            numbers += [torch.rand(MANY), torch.rand(5), torch.rand(MANY)]
        offset += step.used
    with draws(seed=2):
        numbers.append(torch.rand(MANY))
    starts = [tuple(drawn[:5].tolist()) for drawn in numbers]
    assert len({*starts}) == len(starts)
    for one in numbers:
        for other in numbers:
            if one is not other and len(one) == len(other):
                assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 6 / len(one) ** 0.5
    with draws(seed=1):
        assert torch.equal(torch.rand(MANY), numbers[0])


class Attention(nn.Linear):
    """Attention with dropout within."""

    def forward(self, x: Tensor) -> Tensor:
        """Map a sequence."""
        return nn.functional.scaled_dot_product_attention(*[super().forward(x)[None, None]] * 3, dropout_p=0.5)[0, 0]


class OwnGenerator(nn.Linear):
    """Noise of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Add noise."""
        return super().forward(x) + torch.empty(4, 2).uniform_(generator=torch.Generator())


class Checkpointed(nn.Linear):
    """Dropout that runs again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout."""
        found: Tensor = checkpoint(nn.functional.dropout, super().forward(x).sin(), use_reentrant=False)
        return found.sin()


def test_what_cannot_be_drawn_is_a_sentence() -> None:
    x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))

    def refused(model: nn.Module) -> str:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(CompileError) as error:
            nimblec.training_step(model, nn.functional.cross_entropy, optimizer, (x, y))
        return str(error.value)

    assert "rrelu_with_noise" in refused(nn.Sequential(nn.Linear(3, 2), nn.RReLU()))
    assert "draws from a generator of its own" in refused(OwnGenerator(3, 2))
    assert "the backward pass draws random numbers" in refused(Checkpointed(3, 2))


class Backends(TorchFunctionMode):
    """Notes whether each call of attention may use a kernel that drops weights inside."""

    def __init__(self) -> None:
        super().__init__()
        self.may_be_fused: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.may_be_fused.append(torch.backends.cuda.mem_efficient_sdp_enabled())
        return func(*args, **(kwargs or {}))


def test_attention_drops_weights_outside_its_kernel() -> None:
    x = torch.ones(1, 1, 4, 3)
    with Backends() as seen, OtherFunctions(exported=False):
        for p in (0.5, 0.0):
            nn.functional.scaled_dot_product_attention(x, x, x, None, p, True, scale=0.5)
    assert seen.may_be_fused == [False, True]
    optimized = step_of(Attention(3, 2), torch.randn(4, 3), torch.randint(0, 2, (4,)))
    assert "generator.offset" in dict(optimized.named_buffers())


def step_of(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    module: nn.Module = nimblec.training_step(model, nn.functional.cross_entropy, optimizer, (x, y))["train"][0]
    return module
