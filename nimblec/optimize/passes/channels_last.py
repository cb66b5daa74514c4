"""Channels last from end to end, the layout that tensor cores read."""

from collections.abc import Collection

import torch
from torch import fx

from nimblec.graph.definitions import RECURRENT
from nimblec.graph.outputs import output_strides, restore_strides
from nimblec.graph.rewriter import Rewriter, argument_names, bound, fake, is_call
from nimblec.graph.views import is_channels_last
from nimblec.graph.vocabulary import BY_STRIDE, CONVOLUTION_BACKWARD, CONVOLUTIONS, HALF, RESHAPES

aten = torch.ops.aten

CONTIGUOUS = {
    aten.native_group_norm.default: "input",
    aten._weight_norm_interface_backward.default: "grad_w",
    **dict.fromkeys(RECURRENT, "hx"),
}
"""Calls for which CUDA refuses or misreads an argument that is not contiguous, unlike inference, and its name.

Other calls, such as ``native_layer_norm`` and pooling, read any strides or copy by themselves.
Sources: aten/src/ATen/native/group_norm.cpp and cudnn/RNN.cpp, tools/autograd/derivatives.yaml of PyTorch.
"""


def propagate_channels_last(module: fx.GraphModule, dtypes: Collection[torch.dtype] = HALF) -> None:
    """Lay out weights of 2-d convolutions of these dtypes channels last, and their inputs where needed.

    Weights that are trained are copied at each step, once for both passes. Every other call keeps the
    layout of its argument, so one conversion at each border is enough: at the inputs of the first
    convolutions, at ``CONTIGUOUS`` calls, and at outputs, which keep their strides.
    """
    rewriter = Rewriter(module)
    calls = rewriter.calls(*CONVOLUTIONS, CONVOLUTION_BACKWARD)
    convolutions = [n for n in calls if fake(images_of(n)).dim() == 4 and fake(images_of(n)).dtype in dtypes]
    if not convolutions or any(node.target in BY_STRIDE for node in module.graph.nodes):
        return
    strides = output_strides(module)
    _free_views(rewriter)
    for node in convolutions:
        _lay_weights(rewriter, node)
    _convert_inputs(rewriter, frozenset(convolutions))
    restore_strides(module, strides)


def lay_float32_channels_last(module: fx.GraphModule) -> None:
    """Lay out float32 images channels last, as Triton kernels read them; half precision has been laid out before."""
    propagate_channels_last(module, {torch.float32})
    lay_contiguous(module)


def lay_contiguous(module: fx.GraphModule) -> None:
    """Copy arguments that are not contiguous for calls that require it."""
    rewriter = Rewriter(module)
    rewriter.propagate()
    for node in rewriter.calls(*CONTIGUOUS):
        _make_contiguous(rewriter, node)
    rewriter.finish()


def _make_contiguous(rewriter: Rewriter, node: fx.Node) -> None:
    given = bound(node)[CONTIGUOUS[node.target]]
    for source in given if isinstance(given, (list, tuple)) else (given,):
        if not fake(source).is_contiguous():
            copy = rewriter.call(aten.clone.default, source, memory_format=torch.contiguous_format, at=node)
            node.replace_input_with(source, copy)


def _free_views(rewriter: Rewriter) -> None:
    """Replace views by ``reshape``, which copies where the new strides allow no view."""
    for node in rewriter.calls(*RESHAPES):
        node.target = aten.reshape.default


def _lay_weights(rewriter: Rewriter, node: fx.Node) -> None:
    weight = rewriter.value(bound(node)["weight"])
    if weight is None or weight.is_contiguous(memory_format=torch.channels_last):
        return
    laid = rewriter.constant(weight.contiguous(memory_format=torch.channels_last), at=node)
    node.update_arg(argument_names(node).index("weight"), laid)


def images_of(convolution: fx.Node) -> fx.Node:
    """Return the images that a convolution, or its backward pass, reads."""
    given = bound(convolution)
    images: fx.Node = given["input"] if "input" in given else given["self"]
    return images


def _convert_inputs(rewriter: Rewriter, convolutions: frozenset[fx.Node]) -> None:
    """Infer the new strides in order; images that reach a convolution in another layout are copied once."""
    converted: dict[fx.Node, fx.Node] = {}
    trained = {bound(node)["weight"] for node in convolutions if is_call(node, CONVOLUTION_BACKWARD)}
    for node in list(rewriter.graph.nodes):
        if node in convolutions:
            given = bound(node)
            weight = given["weight"] if given["weight"] in trained else None
            for source in (images_of(node), given.get("z"), given.get("grad_output"), weight):
                if source is not None and not is_channels_last(fake(source)):
                    if source not in converted:
                        converted[source] = rewriter.call(
                            aten.clone.default, source, memory_format=torch.channels_last, at=node
                        )
                    node.replace_input_with(source, converted[source])
        elif is_call(node, *CONTIGUOUS):
            _make_contiguous(rewriter, node)
        if node.op == "call_function":
            node.meta["val"] = rewriter.infer(node)
