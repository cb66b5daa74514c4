"""The form and layout of convolutions and products that our kernels and Inductor compute, as no library does."""

import torch
from torch import fx
from torch.nn import functional

from nimblec.graph.outputs import output_strides, restore_strides
from nimblec.graph.rewriter import Rewriter, bound, fake
from nimblec.graph.vocabulary import CONVOLUTIONS, DTYPES
from nimblec.optimize.passes.channels_last import images_of, propagate_channels_last
from nimblec.optimize.pipeline import Pass, Phase, Pipeline

aten = torch.ops.aten

_FIRST_AXIS, _SECOND_AXIS = [0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]
"""How to pad four axes with one more element of the first, and of the second."""


def pad_single_channels(module: fx.GraphModule) -> None:
    """Give images of one channel a channel of zeros: its strides tell that they lie channels last."""
    strides = output_strides(module)
    rewriter = Rewriter(module)
    for node in rewriter.calls(*CONVOLUTIONS):
        given = bound(node)
        images, weight = images_of(node), rewriter.value(given["weight"])
        if fake(images).dim() == 4 and fake(images).shape[1] == 1 and weight is not None:
            padded = rewriter.call(aten.constant_pad_nd.default, images, _SECOND_AXIS, at=node)
            channels = _FIRST_AXIS if given.get("transposed") else _SECOND_AXIS
            weights = rewriter.constant(functional.pad(weight, channels), at=node)
            node.args = (padded, weights, *node.args[2:])
    propagate_channels_last(module, DTYPES)
    restore_strides(module, strides)
    rewriter.finish()


def sum_vectors(module: fx.GraphModule) -> None:
    """Replace products of computed matrices, one of whose sizes is 1, by sums: Inductor generates no such products.

    Those by constant matrices have kernels of their own.
    """
    rewriter = Rewriter(module)
    for node in rewriter.calls(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default):
        *added, left, right = (arg for arg in node.args if isinstance(arg, fx.Node))
        sizes = (*fake(left).shape[-2:], fake(right).shape[-1])
        is_by_constant = fake(right).dim() == 2 and rewriter.value(right) is not None
        if 1 not in sizes or is_by_constant or node.kwargs or len(node.args) > len(added) + 2:
            continue
        columns, rows = (rewriter.call(aten.unsqueeze.default, x, at, at=node) for x, at in ((left, -1), (right, -3)))
        products = rewriter.call(aten.mul.Tensor, columns, rows, at=node)
        result = rewriter.call(aten.sum.dim_IntList, products, [-2], at=node)
        for term in added:
            result = rewriter.call(aten.add.Tensor, result, term, at=node)
        rewriter.replace(node, result)
    rewriter.finish()


def forget_devices(module: fx.GraphModule) -> None:
    """Have calls make tensors where their argument is: the CPU, which recorded them, is not where they will run."""
    for node in module.graph.nodes:
        if "device" in node.kwargs and node.all_input_nodes:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}
    module.recompile()


LAYOUT = Pipeline(
    Phase(
        name="layout",
        passes=(
            Pass(run=pad_single_channels, reason="our kernels, which come next, read and write images channels last"),
            Pass(run=forget_devices, reason="Inductor, which comes later, would make tensors on the CPU"),
            Pass(run=sum_vectors, reason="Inductor, which comes later, fuses sums with what surrounds them"),
        ),
    )
)
