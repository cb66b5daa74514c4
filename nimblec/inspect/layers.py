"""The work of a program by layer of the model, of a training step also by phase: forward, backward and update."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from nimblec.base.places import LOSS, Phase, Place, places
from nimblec.inspect.parts import Part, parts_of
from nimblert.plan import Launch, Plan, Program, Target, Work

Layers: TypeAlias = tuple[str, ...]
Phases: TypeAlias = tuple[str, ...]
Group: TypeAlias = tuple[Layers, Phases]
"""The layers and phases of a command: several for a fused one, none where they are unknown."""


_FORWARD = frozenset({(), (Phase.FORWARD.value,)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Totals of commands: launches, copies and fills, bytes written, and time, each command run alone.

    Of a launch of the CPU target, each node counts. The time is 0 where it was not measured.
    """

    launches: int = 0
    copies: int = 0
    written: int = 0
    duration_ns: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(
            launches=self.launches + other.launches,
            copies=self.copies + other.copies,
            written=self.written + other.written,
            duration_ns=self.duration_ns + other.duration_ns,
        )


def by_layer(plan: Plan, program: Program) -> dict[Group, Share]:
    """Return the work of each layer, in the order in which the model runs them.

    A command fused from several layers or phases is counted once, for all of them together. There are no times if a
    launch has nodes of several: a plan has only their sum. Empty where no op names its layer, as in most ONNX files.
    """
    groups = _groups(plan, program)
    if not groups:
        return {}
    works = [(work, parts_of(plan, work)) for _, work in program.work]
    is_timed = all(len({groups[part.op] for part in parts}) == 1 for _, parts in works)
    order = _order([(part, groups[part.op]) for _, parts in works for part in parts])
    found: dict[Group, Share] = {}
    for work, parts in works:
        for part in parts:
            layers, phases = groups[part.op]
            group = tuple(sorted(layers, key=order.__getitem__)), phases
            duration_ns = work.duration_ns if is_timed and part is parts[0] else 0
            found[group] = found.get(group, Share()) + _share(work, part, duration_ns)
    rows = sorted(found, key=lambda group: (not group[0], [order[layer] for layer in group[0]]))
    return {group: found[group] for group in rows}


def at_depth(shares: dict[Group, Share], most: int) -> tuple[dict[Group, Share], int]:
    """Return the shares in at most ``most`` sets of layers, if possible: paths of modules are cut to a common depth.

    Also that depth, in components of a path; 0 where nothing was cut.
    """
    deepest = max((layer.count(".") + 1 for layers, _ in shares for layer in layers), default=1)
    for depth in range(deepest, 0, -1):
        cut: dict[Group, Share] = {}
        for (layers, phases), share in shares.items():
            group = tuple(dict.fromkeys(".".join(layer.split(".")[:depth]) for layer in layers)), phases
            cut[group] = cut.get(group, Share()) + share
        if depth == 1 or len({layers for layers, _ in cut}) <= most:
            return cut, depth if depth < deepest else 0
    return shares, 0


def _order(issued: Sequence[tuple[Part, Group]]) -> dict[str, int]:
    """Return the rank of each layer: by the first command of its forward pass that reads an input or another's result.

    Layers without one come last, the loss just before them.
    """
    first: dict[str, tuple[bool, bool, bool, int]] = {}
    for place, (part, (layers, phases)) in enumerate(issued):
        for layer in layers:
            rank = phases not in _FORWARD, layer == LOSS, not part.reads_values, place
            first[layer] = min(rank, first.get(layer, rank))
    return {layer: number for number, layer in enumerate(sorted(first, key=first.__getitem__))}


def _share(work: Work, part: Part, duration_ns: int) -> Share:
    is_launch = isinstance(work, Launch)
    return Share(
        launches=int(is_launch),
        copies=int(not is_launch),
        written=sum(result.nbytes for result in part.results),
        duration_ns=duration_ns,
    )


def _groups(plan: Plan, program: Program) -> list[Group]:
    """Return the group of each op; empty where no op names its layer."""
    found = [places(op.source) for op in program.ops]
    if any(place.phase is not Phase.FORWARD for of in found for place in of):
        return [_group(of) if op.source else ((), ()) for op, of in zip(program.ops, found, strict=True)]
    layers = [[_layer(plan, place.layer) for place in of] for of in found]
    if not any(any(of) for of in layers):
        return []
    return [(tuple(dict.fromkeys(layer for layer in of if layer is not None)), ()) for of in layers]


def _group(of: tuple[Place, ...]) -> Group:
    phases = {place.phase for place in of}
    return tuple(dict.fromkeys(place.layer for place in of)), tuple(p.value for p in Phase if p in phases)


def _layer(plan: Plan, name: str) -> str | None:
    """Return the layer that a place names; None for an ONNX node whose name tells none.

    torch.onnx without dynamo calls a node "/layer1/layer1.0/conv1/Conv".
    """
    is_node = plan.target is Target.CPU or "'" in name
    if not is_node:
        return name
    scopes = name.partition("'")[2].rstrip("'").split("/") if "'" in name else name.split("/")
    if scopes[0] or len(scopes) < 2:
        return None
    path = scopes[1:-1]
    outer = [scope for scope, inner in pairwise(path) if not inner.startswith(f"{scope}.")]
    return ".".join((*outer, *path[-1:]))
