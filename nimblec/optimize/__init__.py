"""Rewrites of a model's ATen graph that keep its meaning and its precision."""

import torch
from torch import fx

from nimblec.graph.outputs import output_strides, restore_strides, separate_outputs
from nimblec.graph.rewriter import Rewriter, copied
from nimblec.optimize.activation import fuse_activations
from nimblec.optimize.aligned_weights import align_weights
from nimblec.optimize.attention import fuse_attention
from nimblec.optimize.batch_norm import fold_batch_norm
from nimblec.optimize.branches import join_branches
from nimblec.optimize.constant_masks import state_masks
from nimblec.optimize.copies import drop_copies
from nimblec.optimize.cudnn import fuse_convolutions
from nimblec.optimize.folding import fill_empty, fold_constants
from nimblec.optimize.gelu import recognize_gelu
from nimblec.optimize.layout import lay_contiguous, propagate_channels_last
from nimblec.optimize.numbers import inline_numbers
from nimblec.optimize.pointwise import linear_convolutions
from nimblec.optimize.precision import cast
from nimblec.optimize.recurrent import pack_recurrent_weights
from nimblec.optimize.shared_matrix import join_batches
from nimblec.optimize.side_by_side import join_linears
from nimblec.optimize.simplify import simplify
from nimblec.optimize.subexpressions import merge_equal_calls
from nimblec.optimize.transposed import spread_pixels

ALWAYS = (
    fill_empty,
    fold_constants,
    inline_numbers,
    simplify,
    join_batches,
    merge_equal_calls,
    recognize_gelu,
    fold_batch_norm,
    join_branches,
    fuse_attention,
    state_masks,
    simplify,
    drop_copies,
)
ON_CUDA = (
    linear_convolutions,
    propagate_channels_last,
    spread_pixels,
    fuse_convolutions,
    fuse_activations,
    join_linears,
    align_weights,
    pack_recurrent_weights,
    lay_contiguous,
)
"""Rewrites in their order: each finds what those before it have left."""


def optimize(graph: fx.GraphModule, *, device: str, dtype: torch.dtype | None = None) -> fx.GraphModule:
    """A graph that computes the same in fewer and faster kernels on ``device`` ("cuda" or "cpu").

    With ``dtype``, in that half precision where the graph is in float32: patterns are found before
    casts lie between their calls, and constants are rounded once, when they are folded.

    ``graph`` is flat, pure ATen calls with static shapes, its constants on the device; it stays as
    it is. Outputs keep their dtype, shape, strides and order.
    """
    module = copied(graph)
    if dtype is not None:
        for rewrite in ALWAYS:
            rewrite(module)
        cast(module, dtype)
    for rewrite in (*ALWAYS, *(ON_CUDA if device == "cuda" else ()), merge_equal_calls):
        rewrite(module)
    Rewriter(module).propagate()
    restore_strides(module, output_strides(graph))
    separate_outputs(module)
    return module
