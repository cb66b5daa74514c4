"""Rewrites of a model's ATen graph that keep its meaning and its precision."""

import torch
from torch import fx

from nimblec.graph.outputs import output_strides, restore_strides, separate_outputs
from nimblec.graph.rewriter import Rewriter, copied
from nimblec.graph.simplify import simplify
from nimblec.optimize.canonical.attention_masks import canonicalize_masks
from nimblec.optimize.canonical.copies import drop_copies
from nimblec.optimize.canonical.folding import fill_empty, fold_constants
from nimblec.optimize.canonical.gelu import recognize_gelu
from nimblec.optimize.canonical.numbers import inline_numbers
from nimblec.optimize.canonical.subexpressions import merge_equal_calls
from nimblec.optimize.fuse.activations import fuse_activations
from nimblec.optimize.fuse.attention import fuse_attention
from nimblec.optimize.fuse.batch_norm import fold_batch_norm
from nimblec.optimize.fuse.branches import join_branches
from nimblec.optimize.fuse.convolutions import fuse_convolutions
from nimblec.optimize.fuse.linears import join_linears
from nimblec.optimize.fuse.pointwise import linear_convolutions
from nimblec.optimize.fuse.shared_matrix import join_batches
from nimblec.optimize.layout.aligned_weights import align_weights
from nimblec.optimize.layout.channels_last import lay_contiguous, propagate_channels_last
from nimblec.optimize.layout.recurrent import pack_recurrent_weights
from nimblec.optimize.layout.transposed import block_transposed_convolutions
from nimblec.optimize.precision.cast import cast

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
    canonicalize_masks,
    simplify,
    drop_copies,
)
ON_CUDA = (
    linear_convolutions,
    propagate_channels_last,
    block_transposed_convolutions,
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
