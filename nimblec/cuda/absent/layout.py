"""The form and layout in which our kernels compute all convolutions, as no library takes the rest."""

import torch
from torch import fx

from nimblec.cuda.absent.convolutions import convolve_as_images, join_groups
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
            Pass(run=convolve_as_images, reason="norms and activations are fused with convolutions over one axis, too"),
            Pass(
                run=join_groups,
                needs=(convolve_as_images,),
                reason="it cuts images, and convolutions over one axis may have groups",
            ),
            Pass(
                run=lay_single_channels,
                needs=(convolve_as_images,),
                reason="our kernels, which come next, give results channels last",
            ),
        ),
    )
)
