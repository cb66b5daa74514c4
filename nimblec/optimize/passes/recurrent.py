"""Weights of recurrent networks in one buffer, as cuDNN reads them."""

import torch
from torch import fx

from nimblec.graph.definitions import RECURRENT
from nimblec.graph.rewriter import Rewriter, bound, fake


def pack_recurrent_weights(module: fx.GraphModule) -> None:
    """Move the constant weights of each recurrent network into one buffer.

    cuDNN reads one buffer, and torch would copy other weights into one in each run. Does nothing where
    cuDNN does not support the weights. Source: ``flatten_parameters`` in torch/nn/modules/rnn.py.
    """
    rewriter = Rewriter(module)
    for node in rewriter.calls(*RECURRENT):
        values = [rewriter.value(weight) for weight in bound(node)["params"]]
        weights = [value.clone() for value in values if value is not None and torch.backends.cudnn.is_acceptable(value)]
        if len(weights) == len(values):
            _pack(weights, node)
            packed = [rewriter.constant(weight, at=node) for weight in weights]
            node.args = (*node.args[:2], packed, *node.args[3:])
    rewriter.finish()


def _pack(weights: list[torch.Tensor], node: fx.Node) -> None:
    """Move the weights of a call into one new buffer."""
    from torch.backends.cudnn import rnn

    given = bound(node)
    states = given["hx"] if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
    hidden_size, output_size = fake(states[-1]).shape[2], fake(states[0]).shape[2]
    proj_size = output_size if output_size != hidden_size else 0
    with torch.no_grad():
        torch._cudnn_rnn_flatten_weight(
            weights,
            (4 if given["has_biases"] else 2) + (1 if proj_size else 0),
            fake(given["input"]).shape[2],
            rnn.get_cudnn_mode(RECURRENT[node.target]),
            hidden_size,
            proj_size,
            given["num_layers"],
            given["batch_first"],
            given["bidirectional"],
        )
