"""Recipes as programs of a plan: captured together, then split into programs that share no weight.

They run on the device, like every program: the runtime needs no arithmetic of its own, and the calls give the same bits
as when the plan was compiled.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from nimblec.base.ir import BufferKind, Graph, Part
from nimblec.cuda.derivation import Derivation, strides_of_moved
from nimblec.cuda.refittable import Refittable, whole
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.refit_programs import groups, part_of, refits_in_place, replacing
from nimblec.pytorch.model import TorchModel
from nimblec.pytorch.tensors import DTYPE_NAMES
from nimblec.schedule.lifetimes import task_buffers
from nimblert.plan import Plan, Pointer, Region
from nimblert.plan import Tensor as PlanTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A weight that a constant of the plan holds unchanged, with these strides."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes:
    """The constants of a plan's models that depend on weights, under new names.

    ``names`` are by storage. ``given`` are copies of weights; ``model`` computes the others, ``made``, in this order,
    from the weights as inputs (None: there are no others).
    """

    names: Mapping[int, str]
    given: Mapping[str, Given]
    made: tuple[str, ...]
    model: TorchModel | None

    def named(self, graph: Graph) -> Graph:
        """Return the graph with these names for its replaceable constants."""
        buffers = (
            replace(buffer, name=self.names[buffer.storage], is_replaceable=True)
            if buffer.kind is BufferKind.CONSTANT and buffer.storage in self.names
            else buffer
            for buffer in graph.buffers
        )
        return replace(graph, buffers=tuple(buffers))


def recipes(refittable: Refittable[Any], models: Iterable[TorchModel], device: str) -> Recipes:
    """Return the recipes for the constants of some of the variants, on a device."""
    derivations, weights = refittable.derivations, refittable.weights
    names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    singles: dict[str, Derivation] = {}
    for tensor in refittable.constants(models):
        recipe = derivations.recipe([tensor])
        name = _name(recipe, tensor)
        names[tensor.untyped_storage()._cdata] = name
        tensors.setdefault(name, tensor)
        singles.setdefault(name, recipe)
    given: dict[str, Given] = {}
    made: list[str] = []
    for group in groups({name: recipe.sources for name, recipe in singles.items()}):
        found = _given(singles[group[0]], weights) if len(group) == 1 else None
        if found is None:
            made += group
        else:
            given[group[0]] = found
    model = None
    if made:
        recipe = derivations.recipe([tensors[name] for name in made], on=torch.device(device))
        inputs = tuple((name, weights[name].to(device, copy=True)) for name in recipe.sources)
        args = tuple(tensor for _, tensor in inputs)
        model = TorchModel(module=recipe.module, args=args, kwargs={}, inputs=inputs, is_flat=True)
    return Recipes(names=names, given=given, made=tuple(made), model=model)


def _name(recipe: Derivation, tensor: Tensor) -> str:
    """Return a unique name for a constant: the first of its weights, and a digest of its recipe."""
    digest = sha256(f"{recipe.sources} {tensor.dtype}".encode())
    for node in recipe.module.graph.nodes:
        digest.update(f"{node.op} {node.target} {node.args} {node.kwargs}".encode())
    for fixed in recipe.module.buffers():
        digest.update(f"{fixed.dtype} {tuple(fixed.shape)} {fixed.stride()}".encode())
        digest.update(whole(fixed).cpu().view(torch.uint8).numpy().data)
    return f"{min(recipe.sources)} {digest.hexdigest()[:12]}"


def _given(recipe: Derivation, weights: Mapping[str, Tensor]) -> Given | None:
    """Return the weight that a constant is a copy of, if any."""
    if len(recipe.sources) > 1:
        return None
    (name,) = recipe.sources
    weight = weights[name]
    strides = strides_of_moved(recipe, weight)
    if strides is None:
        return None
    return Given(name=name, dtype=DTYPE_NAMES[weight.dtype], shape=tuple(weight.shape), strides=strides)


def assemble_refittable(parts: Sequence[Part], provenance: Provenance, found: Recipes, made: Graph | None) -> Plan:
    """Return the plan, with refits, of these parts, whose graphs come from `Recipes.named`.

    ``made`` is the captured model of the recipes.
    """
    graphs = [] if made is None else _apart(made, found.made)
    plan = assemble([*parts, *(part_of(graph, str(number)) for number, graph in enumerate(graphs))], provenance)
    offsets = {weight.name: weight.offset for weight in plan.weights}
    given = (
        PlanTensor(
            name=each.name,
            dtype=each.dtype,
            shape=each.shape,
            strides=each.strides,
            pointer=Pointer(region=Region.WEIGHTS, index=0, offset=offsets[constant]),
        )
        for constant, each in found.given.items()
    )
    making = (replacing(program, offsets) for program in plan.programs[len(parts) :])
    return replace(plan, programs=plan.programs[: len(parts)], refits=(*refits_in_place(given), *making))


def _apart(graph: Graph, names: Sequence[str]) -> Iterator[Graph]:
    """Yield the independent parts of a graph, which share only constants; its outputs get these names."""
    outputs = [replace(view, name=name) for view, name in zip(graph.outputs, names, strict=True)]
    shared = {n for n, b in enumerate(graph.buffers) if b.kind in (BufferKind.CONSTANT, BufferKind.WORKSPACE)}
    parent = list(range(len(graph.buffers)))

    def root(buffer: int) -> int:
        while parent[buffer] != buffer:
            parent[buffer] = buffer = parent[parent[buffer]]
        return buffer

    own = [sorted(task_buffers(task) - shared) for task in graph.tasks]
    for first, *others in filter(None, own):
        for other in others:
            parent[root(other)] = root(first)
    members: dict[int, list[int]] = defaultdict(list)
    for number, buffers in enumerate(own):
        if buffers:
            members[root(buffers[0])].append(number)
    for group in dict.fromkeys(root(view.buffer) for view in outputs):
        place = {number: n for n, number in enumerate(members[group])}
        tasks = (graph.tasks[number] for number in place)
        yield replace(
            graph,
            tasks=tuple(
                replace(t, programmatic_after=None if t.programmatic_after is None else place.get(t.programmatic_after))
                for t in tasks
            ),
            inputs=tuple(view for view in graph.inputs if root(view.buffer) == group),
            outputs=tuple(view for view in outputs if root(view.buffer) == group),
        )
