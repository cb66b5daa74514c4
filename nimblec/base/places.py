"""The place in a model that an op comes from, as its source says: the layer, and in a training step the phase.

A source is one place or several with " + " between them: an op that was fused of several. A place is the path of a
module ("model.layer1.0.conv1") or an ONNX node. In a training step that is the forward pass; "loss" is what follows
the model, "backward of PATH" the gradients, and "update of PATH" the optimizer's step for the parameters of a layer.
"""

import enum
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

LOSS = "loss"
SOURCE_KEY = "nimblec.base.source"
"""The key of a node's source in its metadata, in torch's graphs and in ONNX files exported from them."""

_AND, _OF = " + ", " of "
_QUOTE = "'"
"""Encloses the name of an ONNX node."""
_MOST = 8
"""Places that a source names; of more, it names the module that holds them all."""


class Phase(enum.StrEnum):
    """A part of a training step; a model that is not trained has the first only."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Place(NamedTuple):
    """A layer in a phase; ``layer`` is "" where it is the whole model or not known."""

    phase: Phase
    layer: str

    def __str__(self) -> str:
        if self.phase is Phase.FORWARD:
            return self.layer
        return f"{self.phase}{_OF}{self.layer}" if self.layer else str(self.phase)


def places(source: str) -> tuple[Place, ...]:
    """Return the places that a source names, one at least."""
    return tuple(map(_place, source.split(_AND)))


def joined(sources: Iterable[str], own: str = "") -> str:
    """Return the source of an op that replaces ops of these ``sources``.

    An op of an ONNX node keeps its ``own`` source, by which its value can be compared with the model's.
    """
    if _QUOTE in own:
        return own
    found = list(dict.fromkeys(place for source in sources if source for place in places(source)))
    if len(found) > _MOST:
        found = [Place(phase, _holding(p.layer for p in found if p.phase is phase)) for phase in _phases(found)]
    return _AND.join(filter(None, map(str, found)))


def _place(text: str) -> Place:
    for phase in (Phase.BACKWARD, Phase.UPDATE):
        if text == phase:
            return Place(phase, "")
        if text.startswith(f"{phase}{_OF}"):
            return Place(phase, text.removeprefix(f"{phase}{_OF}"))
    return Place(Phase.FORWARD, text)


def _phases(found: Iterable[Place]) -> list[Phase]:
    return list(dict.fromkeys(place.phase for place in found))


def _holding(layers: Iterable[str]) -> str:
    """Return the path of the innermost module that holds all of these."""
    levels = zip(*(layer.split(".") for layer in layers), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len({*names}) == 1, levels))
