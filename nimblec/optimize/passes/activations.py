"""A linear and its activation as one call, with an epilogue of cuBLASLt."""

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, bound, fake, is_call, only_user
from nimblec.graph.vocabulary import RESHAPES, TRANSPOSES, is_relu

aten = torch.ops.aten


def fuse_activations(module: fx.GraphModule) -> None:
    """Fuse ``relu`` or tanh-approximated ``gelu`` of an ``addmm`` into `aten._addmm_activation`.

    Reshapes and transposes may lie between them. The exact ``gelu`` has no such epilogue.
    """
    rewriter = Rewriter(module)
    for node in list(module.graph.nodes):
        use_gelu = is_call(node, aten.gelu.default) and bound(node)["approximate"] == "tanh"
        if not use_gelu and not is_relu(node):
            continue
        linear = node.args[0]
        while is_call(linear, *RESHAPES, *TRANSPOSES) and only_user(linear) is not None:
            linear = linear.args[0]
        if not is_call(linear, aten.addmm.default) or only_user(linear) is None:
            continue
        given = bound(linear)
        if given["alpha"] != 1 or given["beta"] != 1 or fake(given["self"]).dim() != 1:
            continue
        terms = (given["self"], given["mat1"], given["mat2"])
        rewriter.replace(linear, rewriter.call(aten._addmm_activation.default, *terms, use_gelu=use_gelu, at=linear))
        rewriter.replace(node, node.args[0])
    rewriter.finish()
