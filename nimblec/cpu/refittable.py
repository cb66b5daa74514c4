"""A model whose weights can be replaced in its plan: optimised for any weights, with recipes for its constants."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from onnx import ModelProto

from nimblec.cpu import kernels
from nimblec.cpu.constants import keep_apart
from nimblec.cpu.optimizer import OptimizedModel, Rewriting, optimize
from nimblec.cpu.refit_batch_norm import fold_batch_norms
from nimblec.cpu.refit_deciding import deciding_weights
from nimblec.cpu.refit_explain import explain
from nimblec.cpu.refit_recipe import WeightExpression, sources
from nimblec.cpu.refit_weights import weights_of, with_weights
from nimblec.onnx_import import model_nodes
from nimblec.plan.refit_programs import kept_note, perturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Refittable:
    """``optimized`` is the model with other weights; ``weights`` are its own, by name.

    ``recipes`` are those of its constants, by `digest`; ``header`` is that of the models that compute them. The
    weights ``kept`` keep their values. ``before`` and ``after`` count the operators of the model as it is optimised
    without --refittable, and of this one.
    """

    optimized: OptimizedModel
    weights: Mapping[str, np.ndarray]
    recipes: Mapping[bytes, WeightExpression]
    header: kernels.Header
    kept: frozenset[str]
    before: Counter[str]
    after: Counter[str]

    def notes(self) -> Iterator[str]:
        """Yield notes on the optimisations given up and on the weights that cannot be replaced."""
        more, fewer = self.after - self.before, self.before - self.after
        if more or fewer:
            yield f"refittable: an optimisation is given up: {_listed(more)} instead of {_listed(fewer)}"
        else:
            yield "refittable: no optimisation is given up"
        if self.kept:
            yield kept_note(self.kept)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def digest(content: np.ndarray | memoryview) -> bytes:
    """Return the identity of a constant of such a model; an array is in C order."""
    return sha256(content.data if isinstance(content, np.ndarray) else content).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to be made refittable. ``folder`` has its external data; ``names`` are its weights (None: any may be).

    ``plain`` is its optimised form, made by ``rewriting``.
    """

    proto: ModelProto
    folder: Path
    plain: OptimizedModel
    rewriting: Rewriting
    names: frozenset[str] | None = None

    def weights(self) -> dict[str, np.ndarray]:
        """Return the model's weights by name."""
        found = weights_of(self.proto, self.folder)
        return {name: array for name, array in found.items() if self.names is None or name in self.names}


def make_refittable(models: Sequence[Model], scratch: Path) -> list[Refittable]:
    """Optimise the models of one plan so that their weights can be replaced.

    A weight keeps its value in all of them if one of its constants has no recipe, or if two models have different
    weights of that name. ``scratch`` has room for copies of the weights.
    """
    kept = _ambiguous(models)
    while True:
        made = [_made(model, scratch, kept) for model in models]
        more = kept.union(*(one.kept for one in made))
        if more == kept or len(models) == 1:
            return made
        kept = more


def _ambiguous(models: Sequence[Model]) -> frozenset[str]:
    """Return the names that stand for different weights in different models."""
    if len(models) == 1:
        return frozenset()
    found: dict[str, set[bytes]] = defaultdict(set)
    for model in models:
        for name, array in model.weights().items():
            found[name].add(digest(np.ascontiguousarray(array)))
    return frozenset(name for name, digests in found.items() if len(digests) > 1)


def _made(model: Model, scratch: Path, kept: frozenset[str]) -> Refittable:
    folder = model.folder
    folded = ModelProto()
    folded.CopyFrom(model.proto)
    fold_batch_norms(folded)
    read = {name for node in model_nodes.nodes(folded.graph) for name in node.input}
    every = {name: array for name, array in model.weights().items() if name in read}
    kept |= deciding_weights(folded.graph, every)
    weights = {name: array for name, array in every.items() if name not in kept}
    while True:
        first, second = (
            _optimized(folded, folder, perturbed(weights, seed), scratch, model.rewriting) for seed in (0, 1)
        )
        known = explain(first.model, first.weights, first.optimized.arrays, second.optimized.arrays)
        used = {source.name for recipe in known.recipes.values() for source in sources(recipe)}
        understood = {name: array for name, array in weights.items() if name in used}
        if len(understood) == len(weights):
            if not weights or (not known.unknown and _nodes(first) == _nodes(second)):
                break
            understood = {}
        # A weight that no recipe uses became part of something else, such as an attribute.
        weights = understood
    optimized = first.optimized
    keep_apart(optimized.proto, known.recipes)
    before, after = (Counter(kernels.symbol(node) for node in m.proto.graph.node) for m in (model.plain, optimized))
    return Refittable(
        optimized=optimized,
        weights={name: array for name, array in weights.items() if name in used},
        recipes={digest(np.ascontiguousarray(optimized.arrays[n])): recipe for n, recipe in known.recipes.items()},
        header=kernels.header(folded),
        kept=frozenset(every) - used,
        before=before,
        after=after,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Optimized:
    """A model with other weights, and its optimised form."""

    model: ModelProto
    weights: Mapping[str, np.ndarray]
    optimized: OptimizedModel


def _nodes(made: _Optimized) -> list[bytes]:
    return [kernels.canonical(n).SerializeToString(deterministic=True) for n in made.optimized.proto.graph.node]


def _optimized(
    model: ModelProto, folder: Path, weights: Mapping[str, np.ndarray], scratch: Path, rewriting: Rewriting
) -> _Optimized:
    made = with_weights(model, folder, weights, scratch)
    return _Optimized(model=made, weights=weights, optimized=optimize(made, scratch, scratch, rewriting))
