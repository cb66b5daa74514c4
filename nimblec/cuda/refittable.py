"""Models whose weights can be replaced: rewritten for any weights, with recipes for their constants.

A model is rewritten with weights other than its own, all different, so that no pass can use special values. Its
constants then get the values that the recipes compute from its own weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor, fx

from nimblec.base.errors import CompileError, TraceError, UnsupportedModelError
from nimblec.cuda.derivation import Derivations
from nimblec.graph.rewriter import constant_of
from nimblec.graph.state import slots
from nimblec.onnx_import.importer import Weigh
from nimblec.optimize.variants import Variant, as_it_runs
from nimblec.plan.refit_programs import kept_note, perturbed
from nimblec.pytorch.model import TorchModel
from nimblec.pytorch.tensors import as_array, as_tensor
from nimblert.arrays.layouts import is_dense
from nimblert.calls.refitting import replaceable
from nimblert.plan import Plan

K = TypeVar("K")

Weights: TypeAlias = Mapping[str, Tensor]

Variants: TypeAlias = Callable[[TorchModel], Iterable[Variant]]
"""The variants of a model to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Generic[K]):
    """Models that share weights, by key.

    ``weights`` are their own, on the host and in C order. ``given`` is a context in which the models have other
    weights, whose tensors it registers in the `Derivations`.
    """

    weights: Weights
    given: Callable[[Weights, Derivations], AbstractContextManager[Mapping[K, TorchModel]]]


def of_modules(models: Mapping[K, TorchModel]) -> Origin[K]:
    """Describe PyTorch modules, whose weights are floating-point parameters and buffers with at least one axis."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    taken: set[int] = set()
    for model in models.values():
        for name, tensor in (*model.module.named_parameters(), *model.module.named_buffers()):
            storage = tensor.untyped_storage()._cdata
            if storage not in taken:
                taken.add(storage)
                found[name].append(tensor.detach())
    tensors = {name: each[0] for name, each in found.items() if len(each) == 1 and _is_weight(each[0])}
    own = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}

    @contextmanager
    def given(values: Weights, derivations: Derivations) -> Iterator[Mapping[K, TorchModel]]:
        try:
            for name, value in values.items():
                tensors[name].copy_(value)
                derivations.add(name, tensors[name])
            yield models
        finally:
            for name in values:
                tensors[name].copy_(own[name])

    return Origin(weights=own, given=given)


def of_files(load: Callable[[Weigh], Mapping[K, TorchModel]]) -> Origin[K]:
    """Describe models from files, loaded with the weights from a `Weigh`."""
    own: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> Tensor:
        own[name] = tensor
        return tensor

    load(keep)

    @contextmanager
    def given(values: Weights, derivations: Derivations) -> Iterator[Mapping[K, TorchModel]]:
        def weigh(name: str, tensor: Tensor) -> Tensor:
            if name not in values:
                return tensor
            derivations.add(name, values[name])
            return values[name]

        with derivations:
            models = load(weigh)
        yield models

    return Origin(weights={name: tensor for name, tensor in own.items() if _is_weight(tensor)}, given=given)


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is floating-point, has at least one axis, and spans its memory without gaps."""
    is_whole = is_dense(tensor.shape, tensor.stride()) and tensor.nbytes == tensor.untyped_storage().nbytes()
    return bool(tensor.dtype.is_floating_point and tensor.dim() and tensor.numel() and is_whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A variant of a model. ``constants`` has one tensor of each memory that depends on weights."""

    name: str
    model: TorchModel
    constants: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refittable(Generic[K]):
    """The variants of models, by key, with constants computed from the models' own ``weights``.

    ``kept`` are weights that keep their values, since their use is unknown.
    """

    weights: Weights
    derivations: Derivations
    variants: Mapping[K, tuple[Made, ...]]
    failures: tuple[str, ...]
    kept: frozenset[str]

    def as_variants(self, key: K) -> Iterator[Variant]:
        """Yield the finished variants of a model."""
        for made in self.variants[key]:
            yield replace(as_it_runs(made.model), name=made.name, is_original=False)

    def constants(self, models: Iterable[TorchModel]) -> Iterator[Tensor]:
        """Yield the constants of some of the variants."""
        every = {id(each.model): each for made in self.variants.values() for each in made}
        for model in models:
            yield from every[id(model)].constants

    def notes(self, plan: Plan) -> Iterator[str]:
        """Yield notes on the weights that a plan of some of the variants can replace, and on those it cannot."""
        count = len(replaceable(plan))
        yield f"refittable: {count} weights can be replaced, by {sum(len(r.commands) for r in plan.refits)} commands"
        if self.kept:
            yield kept_note(self.kept)


def make_refittable(origin: Origin[K], variants: Variants) -> Refittable[K]:
    """Make all ``variants`` of models so that their weights can be replaced.

    Raises CompileError if a model has no such variant, or if a variant depends on the values of weights.
    """
    kept: frozenset[str] = frozenset()
    while True:
        weights = {name: tensor for name, tensor in origin.weights.items() if name not in kept}
        trial = _Trial(origin, weights, variants, 0)
        lost = trial.lost()
        if not lost:
            break
        kept |= lost
    _Trial(origin, weights, variants, 1, like=trial)
    for made in trial.every():
        _set(made.constants, trial.derivations, weights)
    used = {name for made in trial.every() for tensor in made.constants for name in trial.derivations.sources(tensor)}
    return Refittable(
        weights={name: tensor for name, tensor in weights.items() if name in used},
        derivations=trial.derivations,
        variants=trial.made,
        failures=tuple(trial.failures),
        kept=kept,
    )


class _Trial(Generic[K]):
    """The variants of models with other weights, drawn from a seed; the graphs must be ``like`` another trial's."""

    def __init__(
        self, origin: Origin[K], weights: Weights, variants: Variants, seed: int, like: "_Trial[K] | None" = None
    ) -> None:
        arrays = perturbed({name: as_array(tensor) for name, tensor in weights.items()}, seed)
        self.weights = {name: as_tensor(array) for name, array in arrays.items()}
        self.derivations = Derivations()
        self.failures: dict[str, None] = {}
        self.made: dict[K, tuple[Made, ...]] = {}
        with origin.given(self.weights, self.derivations) as models:
            for key, model in models.items():
                self.made[key] = tuple(self._made(variants(model)))
            if like is not None:
                _refuse_special(like, self)

    def every(self) -> Iterator[Made]:
        """Yield all variants of all models."""
        for made in self.made.values():
            yield from made

    def _made(self, variants: Iterable[Variant]) -> Iterator[Made]:
        with self.derivations:
            for variant in variants:
                try:
                    model = variant.make()
                except (TraceError, UnsupportedModelError) as exc:
                    self.failures[str(exc)] = None
                    continue
                if model.is_compiled or not isinstance(model.module, fx.GraphModule):
                    self.failures.update(dict.fromkeys(model.notes))
                    continue
                yield Made(name=variant.name, model=model, constants=tuple(self._constants(model.module)))

    def _constants(self, module: fx.GraphModule) -> Iterator[Tensor]:
        memories: dict[int, Tensor] = {}
        for node in module.graph.nodes:
            if node.op == "get_attr":
                tensor = constant_of(module, node)
                memories.setdefault(tensor.untyped_storage()._cdata, tensor)
        return (tensor for tensor in memories.values() if self.derivations.sources(tensor))

    def lost(self) -> frozenset[str]:
        """Return the weights that a refit would miss somewhere: in numbers of a program, in state, in unknown uses."""
        found = self.derivations.baked
        for made in self.every():
            untold = [tensor for tensor in made.constants if not self.derivations.is_told(tensor)]
            state = [slot.tensor for slot in slots(made.model.module).values()]
            found = found.union(*map(self.derivations.sources, (*untold, *state)))
        return found


def _refuse_special(one: _Trial[Any], other: _Trial[Any]) -> None:
    """Raise CompileError if two trials give different graphs, or recipes of one do not hold for the other."""
    if not all(one.made.values()):
        why = "; ".join(one.failures) or "it comes from torch.compile"
        raise CompileError(
            f"--refittable: the model cannot become a graph with known weights ({why}): compile a PyTorch module with "
            "-O0, which keeps its weights as they are"
        )
    for first, second in zip(one.every(), other.every(), strict=True):
        same = _text(first.model.module) == _text(second.model.module)
        recipe = one.derivations.recipe(first.constants)
        made = recipe(other.weights) if same else ()
        if not same or not all(map(torch.equal, made, map(whole, second.constants))):
            raise CompileError(
                f"--refittable: the graph of {first.name} depends on the values of its weights: compile without it"
            )


def _text(module: fx.GraphModule) -> list[str]:
    return [f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in module.graph.nodes]


def whole(tensor: Tensor) -> Tensor:
    """Return all of the memory of a tensor, as one axis."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _set(constants: Iterable[Tensor], derivations: Derivations, weights: Weights) -> None:
    """Set constants to the values of their recipes for these weights, computed on the device as by a plan."""
    constants = tuple(constants)
    if constants:
        device = constants[0].device
        recipe = derivations.recipe(constants, on=device)
        given = {name: weights[name].to(device) for name in recipe.sources}
        for tensor, value in zip(constants, recipe(given), strict=True):
            whole(tensor).copy_(value)
