"""The sources, in a PyTorch model, of the nodes of its ONNX file after ONNX Runtime's optimiser."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from onnx import ModelProto, NodeProto

from nimblec.base.places import SOURCE_KEY, Phase, joined
from nimblec.onnx_import.model_nodes import first_output

_BLOCKED = "_nchwc"
"""Suffix of the name of a node that ONNX Runtime laid out in blocks; before it stands the name of its value."""


def sources_of(model: ModelProto, nodes: Sequence[NodeProto]) -> dict[str, str]:
    """Return the source of each of ``nodes`` by its first output, from the metadata of the nodes of ``model``.

    A fused node has the sources of all nodes that it alone computes; one that the optimiser inserted, those of its
    readers. Empty if no node of the model has a source.
    """
    written = {first_output(node): source for node in model.graph.node if (source := _written(node))}
    if not written:
        return {}
    makers = {name: node for node in model.graph.node for name in node.output if name}
    values = {name for node in nodes for name in _values(node)}
    covered = [[name for name in map(first_output, _covered(n, makers, values)) if name in written] for n in nodes]
    times = Counter(chain.from_iterable(covered))
    found: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for node, names in zip(reversed(nodes), reversed(covered), strict=True):
        made = [written[name] for name in reversed(names) if times[name] == 1] or [written[name] for name in names]
        read = (source for name in node.output for source in readers.get(name, ()))
        # A node without readers updates state.
        found[first_output(node)] = source = joined(made) or joined(read) or Phase.UPDATE.value
        for name in filter(None, node.input):
            readers.setdefault(name, []).append(source)
    return found


def _written(node: NodeProto) -> str:
    return next((prop.value for prop in node.metadata_props if prop.key == SOURCE_KEY), "")


def _values(node: NodeProto) -> tuple[str, ...]:
    """Return the names of the node's outputs in the model."""
    return (*filter(None, node.output), *([node.name.removesuffix(_BLOCKED)] if node.name.endswith(_BLOCKED) else []))


def _covered(node: NodeProto, makers: Mapping[str, NodeProto], values: set[str]) -> Iterator[NodeProto]:
    """Yield the nodes of the model that ``node`` computes, the last first: those whose values no other node makes."""
    waiting = [makers[name] for name in _values(node) if name in makers]
    seen = {first_output(maker) for maker in waiting}
    while waiting:
        maker = waiting.pop(0)
        yield maker
        for name in maker.input:
            before = makers.get(name)
            if before is not None and first_output(before) not in seen and not values.intersection(before.output):
                seen.add(first_output(before))
                waiting.append(before)
