"""Images of one channel, whose strides leave open whether they lie channels last."""

import torch
from torch import fx

from nimblec.graph.outputs import output_strides, restore_strides
from nimblec.graph.rewriter import Rewriter, fake
from nimblec.graph.vocabulary import CONVOLUTIONS
from nimblec.optimize.passes.channels_last import images_of
from nimblec.optimize.pipeline import Pass, Phase, Pipeline

aten = torch.ops.aten


def lay_single_channels(module: fx.GraphModule) -> None:
    """Have convolutions read images of one channel as if channels last, so that their results are."""
    strides = output_strides(module)
    rewriter = Rewriter(module)
    for node in rewriter.calls(*CONVOLUTIONS):
        images = images_of(node)
        x = fake(images)
        if x.dim() == 4 and x.shape[1] == 1 and x.is_contiguous() and x.stride(1) != 1:
            batch, _, height, width = x.shape
            rows = rewriter.call(aten.reshape.default, images, [batch, height, width, 1], at=node)
            node.replace_input_with(images, rewriter.call(aten.permute.default, rows, [0, 3, 1, 2], at=node))
    rewriter.propagate()
    restore_strides(module, strides)
    rewriter.finish()


LAYOUT = Pipeline(
    Phase(
        name="layout",
        passes=(
            Pass(
                run=lay_single_channels,
                reason="our kernels, which come next, give results channels last, and no library takes the rest",
            ),
        ),
    )
)
