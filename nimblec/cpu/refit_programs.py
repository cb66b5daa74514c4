"""Recipes as programs of the plan: captured, laid out and lowered like models, with weights as their outputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import numpy_helper

from nimblec.base.ir import Part
from nimblec.cpu import capture
from nimblec.cpu.kernels import Header
from nimblec.cpu.optimizer import OptimizedModel
from nimblec.cpu.refit_recipe import Source, WeightExpression, model_of, sources
from nimblec.cpu.refittable import Refittable, digest
from nimblec.cpu.stretches import Joiner
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.encoder import encode
from nimblec.plan.refit_programs import groups, part_of, refits_in_place, replacing
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.streams import serial
from nimblert.arrays.dlpack import DeviceArray
from nimblert.arrays.layouts import dense_strides
from nimblert.calls import refitting
from nimblert.cpu.backend import CpuLoaded
from nimblert.errors import InputError
from nimblert.plan import Plan, Pointer, Program, Region, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Constants that share weights, by digest: ``given`` are weights themselves, ``made`` are computed."""

    given: Mapping[bytes, Source]
    made: Mapping[bytes, WeightExpression]


def assemble_refittable(
    parts: Sequence[Part], provenance: Provenance, models: Sequence[Refittable]
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of these parts with the models' own weights and with refits; and notes for the user.

    The parts were captured from models with other weights.
    """
    weights: dict[str, np.ndarray] = {}
    recipes: dict[bytes, WeightExpression] = {}
    for model in models:
        weights |= model.weights
        recipes |= model.recipes
    header = models[0].header
    found = list(_groups(recipes))
    made = [group for group in found if group.made]
    plan = assemble([*parts, *(_part(group, header) for group in made)], provenance)
    offsets = {digest(weight.data): weight.offset for weight in plan.weights}
    single = (_tensor(s, offsets[key]) for group in found if not group.made for key, s in group.given.items())
    programs = plan.programs[len(parts) :]
    making = (_refit(program, group, offsets) for program, group in zip(programs, made, strict=True))
    refits = (*refits_in_place(single), *making)
    plan = replace(plan, programs=plan.programs[: len(parts)], refits=refits)
    more = encode(plan).trailer.offset - encode(assemble(parts, provenance)).trailer.offset
    replaced = sum(len(program.inputs) for program in refits)
    notes = dict.fromkeys(note for model in models for note in model.notes())
    notes[f"refittable: {replaced} weights can be replaced; the recipes take {more:,} bytes of the file"] = None
    return with_weights(plan, weights), tuple(notes)


def _groups(recipes: Mapping[bytes, WeightExpression]) -> Iterator[_Group]:
    """Yield the constants in groups that share no weight, in the order of ``recipes``."""
    for keys in groups({key: sources(recipe) for key, recipe in recipes.items()}):
        given = {key: recipe for key in keys if isinstance(recipe := recipes[key], Source)}
        yield _Group(given=given, made={key: recipes[key] for key in keys if key not in given})


def _part(group: _Group, header: Header) -> Part:
    """Return the model that computes the constants of a group; its outputs are named by their digests."""
    model = model_of({key.hex(): recipe for key, recipe in group.made.items()}, header)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    graph = capture.graph_of(OptimizedModel(proto=model, arrays=arrays))
    joined, _ = Joiner().join(graph, serial(dependencies(graph)))
    return part_of(joined, min(group.made).hex())


def _tensor(source: Source, offset: int) -> Tensor:
    return Tensor(
        name=source.name,
        dtype=source.dtype,
        shape=source.shape,
        strides=dense_strides(source.shape),
        pointer=Pointer(region=Region.WEIGHTS, index=0, offset=offset),
    )


def _refit(program: Program, group: _Group, offsets: Mapping[bytes, int]) -> Program:
    """Return a program from weights to constants, as a refit that reads and writes these where the plan has them."""
    given = {source.name: offsets[key] for key, source in group.given.items()}
    made = replacing(program, {key.hex(): offsets[key] for key in group.made}, given)
    names = {tensor.name for tensor in made.inputs}
    others = [_tensor(s, offsets[key]) for key, s in group.given.items() if s.name not in names]
    return replace(made, inputs=(*made.inputs, *others))


def with_weights(plan: Plan, weights: Mapping[str, np.ndarray]) -> Plan:
    """Return the plan as a refit with all its weights would leave it."""
    names = refitting.replaceable(plan)
    refits = refitting.checked(plan, {name: weights[name] for name in names}, _refuse)
    remade = CpuLoaded(plan).remade(refits)
    data = (remade.find(weight.offset)[0].data if weight.data.nbytes else weight.data for weight in plan.weights)
    return replace(plan, weights=tuple(replace(w, data=d) for w, d in zip(plan.weights, data, strict=True)))


def _refuse(value: object, ordinal: int) -> DeviceArray:
    raise InputError(f"{value!r} is on GPU {ordinal}")
