"""Rematerialisation: the backward pass of a training step computes cheap activations again instead of keeping them.

After T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), where it costs a read and a write at most.
"""

from torch import Tensor, fx

from nimblec.graph.fusible import is_copy, is_fusible, is_pointwise
from nimblec.graph.rewriter import Rewriter, fake, owner
from nimblec.optimize.passes.partition import is_kept, makers

_LEAST_NBYTES = 1 << 22
"""The smallest result whose memory is worth another launch."""


def rematerialize(module: fx.GraphModule) -> None:
    """Compute large pointwise results and copies again in the backward pass, from values that it reads anyway.

    These are results like those of GELU, dropout and padding.
    """
    kept = {maker for node in module.graph.nodes for maker in makers(node) if is_kept(maker, node)}
    cheap: set[fx.Node] = set()
    for node in module.graph.nodes:
        is_there = (m in kept or m in cheap or m.op != "call_function" for m in makers(node))
        if _is_cheap(node) and (node not in kept or fake(node).nbytes >= _LEAST_NBYTES) and all(is_there):
            cheap.add(node)
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node, reader: fx.Node) -> fx.Node:
        if owner(node) not in cheap or not is_kept(owner(node), reader):
            return node
        if node not in copies:
            with module.graph.inserting_before(reader):
                copies[node] = module.graph.node_copy(node, lambda source: again(source, reader))
            copies[node].meta["source"] = reader.meta.get("source", "")
        return copies[node]

    for reader in [node for node in module.graph.nodes if node.op == "call_function" and owner(node) is node]:
        for source in reader.all_input_nodes:
            reader.replace_input_with(source, again(source, reader))
    Rewriter(module).finish()


def _is_cheap(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.meta["val"], Tensor):
        return False
    return is_fusible(node) and (is_pointwise(node) or is_copy(node))
