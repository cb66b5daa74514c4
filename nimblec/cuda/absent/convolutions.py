"""Convolutions that on a GPU a library computes, in the form that our kernels compute: of images, in one group."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from nimblec.graph.outputs import output_strides, restore_strides
from nimblec.graph.rewriter import Rewriter, bound, fake, only_user
from nimblec.graph.vocabulary import CONVOLUTION, CONVOLUTIONS, DTYPES, activation_of
from nimblec.kernels.images import ALIGNMENT_NBYTES
from nimblec.optimize.passes.channels_last import propagate_channels_last

aten = torch.ops.aten

_ONE_CHANNEL = [0, 0, 0, 0, 0, 1]
"""Padding after the channels."""

_WIDTH = 256
"""Channels of a part: with more of them a launch multiplies more zeros, with fewer there are more launches."""


def convolve_as_images(module: fx.GraphModule) -> None:
    """Replace convolutions over one axis by those of images of one row, channels last."""
    strides = output_strides(module)
    rewriter = Rewriter(module)
    for convolution in rewriter.calls(CONVOLUTION):
        node, given = convolution, bound(convolution)
        weight = rewriter.value(given["weight"])
        if fake(node).dim() == 3 and weight is not None and not given["transposed"]:
            images, weight = rewriter.call(aten.unsqueeze.default, given["input"], 2, at=node), weight.unsqueeze(2)
            if _channels(given) == 1:
                # With one channel and one row, no strides tell that images lie channels last: a channel of zeros does.
                images = rewriter.call(aten.constant_pad_nd.default, images, _ONE_CHANNEL, at=node)
                weight = functional.pad(weight, _ONE_CHANNEL)
            given |= {"input": images, "weight": rewriter.constant(weight, at=node)}
            for name, of_rows in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
                given[name] = [of_rows, *given[name]]
            images, user = rewriter.call(CONVOLUTION, *given.values(), at=node), only_user(node)
            if user is not None and activation_of(user) is not None:
                # The kernel computes an activation of images, too.
                images = rewriter.call(user.target, images, *user.args[1:], at=user, **user.kwargs)
                node = user
            rewriter.replace(node, rewriter.call(aten.squeeze.dim, images, 2, at=node))
    propagate_channels_last(module, DTYPES)
    restore_strides(module, strides)
    rewriter.finish()


def join_groups(module: fx.GraphModule) -> None:
    """Replace convolutions of several groups by convolutions of one, whose weights between groups are zero.

    A convolution of many channels becomes several, of some groups each. An infinite number of one group would become
    NaN in the others. Depthwise convolutions have kernels of their own.
    """
    strides = output_strides(module)
    rewriter = Rewriter(module)
    for node in rewriter.calls(*CONVOLUTIONS):
        given = bound(node)
        groups, weight = given["groups"], rewriter.value(given["weight"])
        if weight is None or weight.dim() != 4 or given.get("transposed") or groups in {1, _channels(given)}:
            continue
        count = 1 if "z" in given else _part_count(given, weight)
        parts = list(_parts(rewriter, node, weight, count))
        rewriter.replace(node, parts[0] if count == 1 else rewriter.call(aten.cat.default, parts, 1, at=node))
    rewriter.propagate()
    restore_strides(module, strides)
    rewriter.finish()


def _images(given: dict[str, Any]) -> str:
    return "input" if "input" in given else "self"


def _channels(given: dict[str, Any]) -> int:
    return fake(given[_images(given)]).shape[1]


def _part_count(given: dict[str, Any], weight: Tensor) -> int:
    """Return the fewest parts that are narrow enough, if our kernels can read them where they lie; else 1."""
    groups, channels, itemsize = given["groups"], _channels(given), weight.element_size()
    for count in (count for count in range(1, groups + 1) if groups % count == 0):
        if max(channels, weight.shape[0]) <= count * _WIDTH or count == groups:
            return 1 if channels // count * itemsize % ALIGNMENT_NBYTES else count
    return 1


def _parts(rewriter: Rewriter, node: fx.Node, weight: Tensor, count: int) -> Iterator[fx.Node]:
    given = bound(node)
    bias, read = rewriter.value(given["bias"]), _channels(given) // count
    for part, rows in enumerate(weight.chunk(count)):
        arguments = given | {"groups": 1, "weight": rewriter.constant(_dense(rows, given["groups"] // count), at=node)}
        if count > 1:
            arguments[_images(given)] = rewriter.call(
                aten.slice.Tensor, given[_images(given)], 1, part * read, (part + 1) * read, at=node
            )
            if bias is not None:
                arguments["bias"] = rewriter.constant(bias.chunk(count)[part].clone(), at=node)
        yield rewriter.call(node.target, *arguments.values(), at=node)


def _dense(weight: Tensor, groups: int) -> Tensor:
    """Return the weights (out channels, channels, height, width) of one group that computes several."""
    blocks = weight.unflatten(0, (groups, -1))
    dense = weight.new_zeros(groups, blocks.shape[1], groups, *weight.shape[1:])
    for group in range(groups):
        dense[group, :, group] = blocks[group]
    return dense.flatten(2, 3).flatten(0, 1).contiguous(memory_format=torch.channels_last)
