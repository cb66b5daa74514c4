"""The refits of a plan: which of its weights can be replaced, and how they are made of the model's."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nimblec.ir import BufferKind
from nimblec.schedule.lifetimes import used_buffers
from nimblert.layouts import dense_strides
from nimblert.plan import Pointer, Program, Region, Role, Tensor

if TYPE_CHECKING:
    from nimblec.assembly import Part


def refits(parts: "Sequence[Part]") -> tuple[Program, ...]:
    """One refit without commands, of the weights that the plan holds as the model has them, if there are any."""
    given = sorted(_given(parts), key=lambda tensor: (tensor.pointer.offset, tensor.name))
    if not given:
        return ()
    return (refit("weights", given),)


def refit(name: str, inputs: Sequence[Tensor]) -> Program:
    """A refit that makes no weights: its inputs lie where the programs read them."""
    return Program(
        name=name,
        inputs=tuple(inputs),
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


def _given(parts: "Sequence[Part]") -> Iterator[Tensor]:
    """The weights that lie alone in one place, and are used nowhere in another form."""
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
