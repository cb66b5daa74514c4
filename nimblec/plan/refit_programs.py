"""The refits of a plan: programs that write its weights, or constants computed from them."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from nimblec.base.ir import BufferKind, Graph, Part
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.lifetimes import used_buffers
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import serial
from nimblert.arrays.layouts import dense_strides
from nimblert.plan import (
    Access,
    Command,
    Crop,
    Launch,
    Memcpy,
    Memset,
    Pointer,
    Program,
    Record,
    Region,
    Role,
    Switch,
    Tensor,
    Wait,
    While,
)


def refits(parts: Sequence[Part]) -> tuple[Program, ...]:
    """Return one refit without commands, of the weights that the plan holds unchanged, if there are any."""
    return refits_in_place(_given(parts))


def refits_in_place(weights: Iterable[Tensor]) -> tuple[Program, ...]:
    """Return one refit without commands, of weights that the programs read as they are, if there are any."""
    inputs = tuple(sorted(weights, key=lambda tensor: (tensor.pointer.offset, tensor.name)))
    if not inputs:
        return ()
    refit = Program(
        name="weights",
        inputs=inputs,
        outputs=(),
        input_nbytes=(),
        output_nbytes=(),
        arena_nbytes=0,
        stream_count=1,
        event_count=0,
        ops=(),
        commands=(),
        role=Role.REFIT,
    )
    return (refit,)


def part_of(graph: Graph, name: str) -> Part:
    """Wrap a graph of constants, in its captured order, as a part whose program `replacing` makes a refit."""
    schedule = serial(dependencies(graph))
    return Part(graph=graph, schedule=schedule, memory=layout(graph, schedule), entry=f"refit {name}")


def replacing(program: Program, offsets: Mapping[str, int], given: Mapping[str, int] | None = None) -> Program:
    """Return a program from weights to constants, as a refit that writes the constants where the plan has them.

    ``offsets`` are the places of the constants in WEIGHTS by output name, ``given`` those of the inputs that the plan
    holds there unchanged.
    """
    given = given or {}
    apart = [tensor for tensor in program.inputs if tensor.name not in given]
    moved: dict[tuple[Region, int], Pointer] = {}
    for tensor in program.inputs:
        moved[Region.INPUT, tensor.pointer.index] = (
            Pointer(region=Region.WEIGHTS, index=0, offset=given[tensor.name])
            if tensor.name in given
            else Pointer(region=Region.INPUT, index=apart.index(tensor), offset=0)
        )
    for tensor in program.outputs:
        moved[Region.OUTPUT, tensor.pointer.index] = Pointer(
            region=Region.WEIGHTS, index=0, offset=offsets[tensor.name]
        )

    def move(pointer: Pointer) -> Pointer:
        start = moved.get((pointer.region, pointer.index))
        return pointer if start is None else replace(start, offset=start.offset + pointer.offset)

    inputs = tuple(replace(tensor, pointer=move(tensor.pointer)) for tensor in program.inputs)
    return replace(
        program,
        name=min(tensor.name for tensor in inputs),
        entry="",
        inputs=inputs,
        outputs=(),
        input_nbytes=tuple(program.input_nbytes[tensor.pointer.index] for tensor in apart),
        output_nbytes=(),
        commands=tuple(_moved(command, move) for command in program.commands),
        role=Role.REFIT,
    )


def _moved(command: Command, move: Callable[[Pointer], Pointer]) -> Command:
    match command:
        case Launch():
            return replace(
                command,
                relocations=tuple(replace(r, pointer=move(r.pointer)) for r in command.relocations),
                reads=tuple(Access(pointer=move(a.pointer), nbytes=a.nbytes) for a in command.reads),
                writes=tuple(Access(pointer=move(a.pointer), nbytes=a.nbytes) for a in command.writes),
            )
        case Memcpy():
            return replace(command, dst=move(command.dst), src=move(command.src))
        case Memset():
            return replace(command, dst=move(command.dst))
        case Record() | Wait() | While() | Switch() | Crop():
            return command


def _given(parts: Sequence[Part]) -> Iterator[Tensor]:
    """Yield the weights that have one place to themselves and are used in no other form."""
    names: dict[int, set[str | None]] = defaultdict(set)
    places: dict[str, set[int]] = defaultdict(set)
    found: dict[str, Tensor] = {}
    for part in parts:
        graph, offsets = part.graph, part.memory.offsets
        weights = {index: name for name, index in graph.weights}
        for index in used_buffers(graph):
            buffer = graph.buffers[index]
            if buffer.kind is not BufferKind.CONSTANT or not buffer.nbytes:
                continue
            name = weights.get(index)
            names[offsets[index]].add(name)
            if name is not None:
                places[name].add(offsets[index])
                found[name] = Tensor(
                    name=name,
                    dtype=buffer.dtype,
                    shape=buffer.shape,
                    strides=dense_strides(buffer.shape),
                    pointer=Pointer(region=Region.WEIGHTS, index=0, offset=offsets[index]),
                )
    folded = {name for part in parts for name in part.graph.folded}
    for name, tensor in found.items():
        if name not in folded and len(places[name]) == 1 and names[tensor.pointer.offset] == {name}:
            yield tensor


_SMALL_NBYTES = 1024
"""Smaller weights may be drawn equal by chance."""


def perturbed(weights: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Return other weights by name, slightly larger, so that variances stay positive, and no two equal."""
    found: dict[str, np.ndarray] = {}
    taken: set[bytes] = set()
    for name, array in weights.items():
        for attempt in range(1000):
            digits = hashlib.sha256(f"{seed} {attempt} {name}".encode()).digest()
            random = np.random.default_rng(list(digits))
            noise = random.uniform(0.05, 0.1, array.shape)
            made = (np.abs(array.astype(np.float64)) * noise + noise / 8 + array).astype(array.dtype)
            if made.tobytes() not in taken:
                break
        if made.nbytes <= _SMALL_NBYTES:
            taken.add(made.tobytes())
        found[name] = made
    return found


K = TypeVar("K")

_SHOWN = 4
"""A note lists this many names."""


def groups(sources: Mapping[K, Iterable[Hashable]]) -> Iterator[list[K]]:
    """Yield the groups of constants that share weights; ``sources`` are the weights that each depends on."""
    group_of: dict[Hashable, int] = {}
    members: dict[int, list[K]] = {}
    for number, (constant, weights) in enumerate(sources.items()):
        own = tuple(weights)
        met = {group_of[weight] for weight in own if weight in group_of}
        first = min(met, default=number)
        members.setdefault(first, []).append(constant)
        for other in met - {first}:
            members[first] += members.pop(other)
        joined = (weight for member in members[first] for weight in sources[member]) if len(met) > 1 else own
        group_of |= dict.fromkeys(joined, first)
    yield from members.values()


def kept_note(kept: Collection[str]) -> str:
    """Return the note that some weights keep their values."""
    more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
    names = ", ".join(map(repr, sorted(kept)[:_SHOWN])) + more
    return f"refittable: weights that keep their values, as no recipe was found for them: {names}"
