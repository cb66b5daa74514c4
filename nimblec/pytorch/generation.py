"""Whole generations as entries of a plan: prefill for each length of prompts, and one loop that makes all tokens.

The loop is torch's while_loop over the model's next token; key-value caches, the last tokens and their positions are
state that the entries share.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nimblec.base.errors import ArgumentError
from nimblec.pytorch.export_errors import exporting
from nimblec.pytorch.philox import uniform
from nimblec.pytorch.state import Writing, written_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen from logits: the most likely one at temperature 0, else a drawn one.

    Of the logits, divided by ``temperature``, the ``top_k`` largest count (0: all), and of these the fewest whose
    probabilities together reach ``top_p``.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def choose(self, logits: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        """Return a token for each row of ``logits`` (batch x vocabulary); see `advance` for the random numbers."""
        if not self.temperature:
            return logits.argmax(-1)
        scaled = logits.float() / self.temperature
        if self.top_k:
            least = torch.topk(scaled, min(self.top_k, scaled.shape[-1])).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        if self.top_p < 1:
            ordered = torch.sort(scaled, descending=True).values
            likely = torch.softmax(ordered, -1)
            kept = (likely.cumsum(-1) - likely) < self.top_p
            least = ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        counters = torch.arange(self.advance(logits.shape), device=logits.device) + offset
        drawn = uniform(seed, counters, logits.numel()).reshape(logits.shape) + 2.0**-25  # above 0
        return (scaled - torch.log(-torch.log(drawn))).argmax(-1)  # Gumbel's noise: a draw from the softmax

    def advance(self, shape: Sequence[int]) -> int:
        """Return by how much one choice from logits of this shape advances the offset of the generator."""
        return -(-shape[0] * shape[1] // 4) if self.temperature else 0


class _Generator(nn.Module):
    """What the entries share: the model with its caches, and the last token of each sequence and its position."""

    token: Tensor
    position: Tensor
    seed: Tensor
    offset: Tensor

    def __init__(self, model: nn.Module, caches: Iterable[str], batch: int, seed: int) -> None:
        super().__init__()
        self.model, self.caches = model, tuple(caches)
        self.register_buffer("token", torch.zeros(batch, dtype=torch.int64))
        self.register_buffer("position", torch.zeros(batch, dtype=torch.int64))
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("offset", torch.tensor(0))


class _Entry(Writing):
    """An entry, which writes all that the entries share but the seed."""

    makes_aten_calls = False

    def __init__(self, shared: _Generator, sampling: Sampling) -> None:
        super().__init__()
        self.shared, self.sampling = shared, sampling
        self.settable = ("shared.seed",) if sampling.temperature else ()
        self.kept = ("token", "position", *(["offset"] if sampling.temperature else []))
        names = (*self.kept, *(f"model.{name}" for name in shared.caches))
        self.writes = (*(f"shared.{name}" for name in names), *self.settable)


class _Prefill(_Entry):
    """Reads prompts, padded to one length, and chooses the first new token of each."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the first new token of each prompt (batch) from prompts (batch x length) and their lengths (batch)."""
        shared = self.shared
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        logits = shared.model(ids, positions)
        last = logits.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, logits.shape[-1])).squeeze(1)
        token = self.sampling.choose(last, shared.seed, shared.offset)
        if self.sampling.temperature:
            shared.offset.copy_(shared.offset + self.sampling.advance(last.shape))
        shared.token.copy_(token)
        shared.position.copy_(lengths)
        return token


class _Generate(_Entry):
    """Makes tokens until there are as many as asked for, the caches are full, or all sequences have ended."""

    def __init__(self, shared: _Generator, sampling: Sampling, most: int, length: int, eos: int | None) -> None:
        super().__init__(shared, sampling)
        self.most, self.length, self.eos = most, length, eos

    def forward(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new tokens (batch x most), from the first on, and how many each sequence has got at most.

        What follows a sequence's end is the token that ends it, and what follows the last new token is -1: each trip
        writes its tokens alone, so that a caller may read them while the loop runs.
        """
        shared, sampling, most = self.shared, self.sampling, self.most
        kept = [getattr(shared, name) for name in self.kept]
        held = {**dict(shared.model.named_parameters()), **dict(shared.model.named_buffers())}
        caches = [held.pop(name) for name in shared.caches]
        states = len(kept) + len(caches)

        def goes_on(step: Tensor, _made: Tensor, token: Tensor, position: Tensor, *rest: Tensor) -> Tensor:
            going = (step < rest[states - 2]) & (step < most) & (position.amax() < self.length)
            return going if self.eos is None else going & (token != self.eos).any()

        def make(step: Tensor, made: Tensor, *rest: Tensor) -> Any:
            token, position, *offsets = rest[: len(kept)]
            written = [cache.clone() for cache in rest[len(kept) : states]]
            _asked, seed, offset, *read = rest[states:]
            given = dict(zip((*shared.caches, *held), (*written, *read), strict=True))
            logits = functional_call(shared.model, given, (token[:, None], position[:, None]))[:, -1]
            following = sampling.choose(logits, seed, offsets[0] if offsets else offset)
            if self.eos is not None:
                following = torch.where(token == self.eos, token, following)
            made = torch.index_copy(made, 1, step.reshape(1), following[:, None])
            drawn = [offset + sampling.advance(logits.shape) for offset in offsets]
            return step + 1, made, following, position + 1, *drawn, *written

        first = (
            torch.zeros((), dtype=torch.int64, device=count.device),
            torch.full((len(shared.token), most), -1, dtype=torch.int64, device=count.device),
            *(tensor.clone() for tensor in (*kept, *caches)),
        )
        # torch.while_loop would have Dynamo read the model's code, which may do what Dynamo refuses.
        others = (count, shared.seed, shared.offset, *held.values())
        step, made, *last = torch.ops.higher_order.while_loop(goes_on, make, first, others)
        for tensor, value in zip((*kept, *caches), last, strict=True):
            tensor.copy_(value)
        return made, step


def entries(
    model: nn.Module,
    *,
    prompts: Sequence[int],
    max_new_tokens: int,
    batch: int,
    sampling: Sampling,
    eos: int | None,
    seed: int,
) -> Mapping[str, tuple[Any, ...]]:
    """Return the entries of `nimblec.generate`."""
    _check(model, prompts, max_new_tokens, batch, sampling)
    length = max(prompts) + max_new_tokens
    if hasattr(model, "generation_config"):
        from nimblec.pytorch.transformers_cache import Cached

        model = Cached(model, batch, length)
        caches: Iterable[str] = model.caches
    else:
        example = torch.zeros(batch, min(prompts), dtype=torch.int64)
        with exporting(type(model).__name__, "torch.export"):
            program = torch.export.export(model, (example, torch.zeros_like(example)))
        caches = written_by(type(model).__name__, program)
    shared = _Generator(model, caches, batch, seed)
    made: dict[str, tuple[Any, ...]] = {}
    for size in sorted(set(prompts)):
        ids, lengths = torch.zeros(batch, size, dtype=torch.int64), torch.full((batch,), size)
        made[f"prefill_{size}"] = _Prefill(shared, sampling).eval(), (ids, lengths)
    made["generate"] = _Generate(shared, sampling, max_new_tokens, length, eos).eval(), (torch.tensor(2),)
    return made


def _check(model: Any, prompts: Sequence[int], max_new_tokens: int, batch: int, sampling: Sampling) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    if not prompts or min(prompts) < 1:
        raise ArgumentError(f"prompts: {tuple(prompts)}, expected lengths of at least 1")
    if max_new_tokens < 1 or batch < 1:
        raise ArgumentError(f"max_new_tokens, batch: {max_new_tokens}, {batch}, expected at least 1")
    if sampling.temperature < 0 or sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
        raise ArgumentError(
            f"temperature, top_k, top_p: {sampling.temperature}, {sampling.top_k}, {sampling.top_p}, expected at least "
            "0, at least 0, and above 0 to 1"
        )
