"""Rematerialisation: the backward pass of a training step computes cheap activations again instead of keeping them.

After T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), for results that cost one pass over memory.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, fx

from nimblec.graph.fusible import is_copy, is_fusible, is_pointwise, is_stencil
from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, owner
from nimblec.optimize.passes.partition import is_kept

aten = torch.ops.aten

_NORMS = (aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default)
_LEAST_NBYTES = 1 << 22
"""The smallest result whose memory is worth another launch."""


def rematerialize(module: fx.GraphModule) -> None:
    """Compute large pointwise results, copies and norms again in the backward pass, from values that it reads anyway.

    These are results like those of GELU, dropout and padding. A result that depends on a norm's is computed again only
    inside the generated kernels that read it.
    """
    rewriter = Rewriter(module)
    for node in rewriter.calls(aten.reflection_pad2d_backward.default):
        if min(bound(node)["padding"]) >= 0:
            _drop_image(rewriter, node)
    readers = _readers(module.graph)
    cheap = _cheap(module.graph, readers)
    copies: dict[tuple[fx.Node, fx.Node | None], fx.Node] = {}

    def again(node: fx.Node, reader: fx.Node) -> fx.Node:
        if owner(node) not in cheap or not is_kept(owner(node), reader):
            return node
        # Where a generated kernel computes its own copy, it does not store it.
        key = node, reader if _computes_arguments(reader) else None
        if key not in copies:
            copies[key] = _copy(rewriter, node, reader, lambda source: again(source, reader))
        return copies[key]

    late = {reader for those in readers.values() for reader in those}
    for reader in [node for node in module.graph.nodes if node in late]:
        for source in reader.all_input_nodes:
            reader.replace_input_with(source, again(source, reader))
    rewriter.finish()


def _drop_image(rewriter: Rewriter, padding: fx.Node) -> None:
    """Give the backward call of a padding, which reads only the shape of its image, a crop of its gradient instead."""
    given = bound(padding)
    (left, _, top, _), (height, width) = given["padding"], fake(given["self"]).shape[-2:]
    rows = rewriter.call(aten.slice.Tensor, given["grad_output"], -2, top, top + height, at=padding)
    crop = rewriter.call(aten.slice.Tensor, rows, -1, left, left + width, at=padding)
    padding.replace_input_with(given["self"], crop)


def _readers(graph: fx.Graph) -> Mapping[fx.Node, Sequence[fx.Node]]:
    """Map each value of the forward pass that the backward pass reads to the backward calls that read it."""
    readers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and owner(node) is node:
            for value in map(owner, node.all_input_nodes):
                if is_kept(value, node):
                    readers[value].append(node)
    return dict(readers)


def _cheap(graph: fx.Graph, readers: Mapping[fx.Node, Sequence[fx.Node]]) -> Collection[fx.Node]:
    """Return the values to compute again, and those between them and what is read anyway.

    Results of parameters and inputs alone, such as cast weights, are kept: computing them slows small batches.
    """
    cheap: set[fx.Node] = set()
    normed: set[fx.Node] = set()
    for node in graph.nodes:
        sources = _sources(node)
        calls = [source for source in sources if source.op == "call_function"]
        if not sources or any(call not in readers and call not in cheap for call in calls):
            continue
        needs_norm = _is_norm(node) or not normed.isdisjoint(sources)
        is_worth_it = not needs_norm or all(map(_computes_arguments, readers.get(node, ())))
        if node not in readers:
            cheap.add(node)
            if needs_norm:
                normed.add(node)
        elif calls and is_worth_it and fake(node).nbytes >= _LEAST_NBYTES:
            cheap.add(node)
    return cheap


def _computes_arguments(reader: fx.Node) -> bool:
    """Return whether a generated kernel computes a call together with its arguments."""
    return is_fusible(reader) and not is_stencil(reader)


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the values from which a cheap result can be computed again; none for all else."""
    if _is_norm(node):
        image, *vectors = _parts(node)
        return [owner(part) for part in (image, *filter(None, vectors))] if vectors[0] and vectors[1] else []
    is_one = node.op == "call_function" and isinstance(node.meta["val"], Tensor)
    is_cheap = is_one and is_fusible(node) and (is_pointwise(node) or is_copy(node))
    return [owner(source) for source in node.all_input_nodes] if is_cheap else []


def _is_norm(node: fx.Node) -> bool:
    """Return whether a value is what a batch norm or an instance norm makes of its images."""
    return node.target is operator.getitem and argument(node, 1) == 0 and is_call(argument(node, 0), *_NORMS)


def _parts(node: fx.Node) -> tuple[fx.Node, *tuple[fx.Node | None, ...]]:
    """Return the images of a norm, their mean and inverse standard deviation if they are read, weight and bias."""
    norm = argument(node, 0)
    given, results = bound(norm), {argument(user, 1): user for user in norm.users}
    return given["input"], results.get(1), results.get(2), given["weight"], given["bias"]


def _copy(rewriter: Rewriter, node: fx.Node, reader: fx.Node, again: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Return a copy of a cheap result, computed before ``reader``."""
    if not _is_norm(node):
        with rewriter.graph.inserting_before(reader):
            copied = rewriter.graph.node_copy(node, again)
        copied.meta["source"] = reader.meta.get("source", "")
        return copied
    image, *vectors = _parts(node)
    result = again(image)
    shape = [1, -1, *[1] * (fake(node).dim() - 2)]
    for operation, vector in zip((aten.sub, aten.mul, aten.mul, aten.add), vectors, strict=True):
        if vector is not None:
            column = rewriter.call(aten.reshape.default, again(vector), shape, at=reader)
            result = rewriter.call(operation.Tensor, result, column, at=reader)
    return rewriter.call(aten._to_copy.default, result, dtype=fake(node).dtype, at=reader)
