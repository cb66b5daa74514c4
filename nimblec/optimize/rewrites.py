"""The passes that keep a graph's meaning and precision, in their order."""

from nimblec.graph.outputs import keep_outputs
from nimblec.graph.simplify import simplify
from nimblec.kernels.reductions.cached_rewrite import attend_to_caches
from nimblec.kernels.reductions.fp8_results import write_fp8
from nimblec.optimize.passes.activations import fuse_activations
from nimblec.optimize.passes.aligned_weights import align_weights
from nimblec.optimize.passes.attention import fuse_attention
from nimblec.optimize.passes.attention_masks import canonicalize_masks
from nimblec.optimize.passes.batch_norm import fold_batch_norm
from nimblec.optimize.passes.biases import free_biases
from nimblec.optimize.passes.branches import join_branches
from nimblec.optimize.passes.cast import cast
from nimblec.optimize.passes.channels_last import lay_contiguous, propagate_channels_last
from nimblec.optimize.passes.convolutions import fuse_convolutions
from nimblec.optimize.passes.copies import drop_copies
from nimblec.optimize.passes.folding import fill_empty, fold_constants
from nimblec.optimize.passes.generate import generate_regions
from nimblec.optimize.passes.layout_gradients import split_gradients
from nimblec.optimize.passes.layout_groups import lay_groups_contiguous
from nimblec.optimize.passes.linears import join_linears
from nimblec.optimize.passes.numbers import inline_numbers
from nimblec.optimize.passes.one_axis import convolve_as_images
from nimblec.optimize.passes.pointwise import linear_convolutions
from nimblec.optimize.passes.recurrent import pack_recurrent_weights
from nimblec.optimize.passes.rematerialize import rematerialize
from nimblec.optimize.passes.row_order import undo_row_orders
from nimblec.optimize.passes.shared_matrix import join_batches
from nimblec.optimize.passes.state import mark_writes, write_state
from nimblec.optimize.passes.subexpressions import merge_equal_calls
from nimblec.optimize.passes.transposed import block_transposed_convolutions
from nimblec.optimize.passes.written_activations import recognize_activations
from nimblec.optimize.pipeline import Pass, Phase, Pipeline, Setting

CANONICAL = (
    Pass(run=fill_empty, reason="zeros depend on nothing, so fold_constants computes what is made of them"),
    Pass(
        run=fold_constants,
        needs=(fill_empty,),
        reason="later passes look for weights, and a transposed or reshaped weight is a call until it is folded",
    ),
    Pass(
        run=inline_numbers,
        needs=(fold_constants,),
        reason="a computed number is a constant only once it is folded",
    ),
    Pass(
        run=simplify,
        needs=(fold_constants,),
        reason="later passes look through one view, not through a chain of them",
    ),
)
FUSE = (
    Pass(
        run=join_batches,
        needs=(fold_constants, simplify),
        reason="it finds repeated matrices in folded constants, and leaves a product whose bias fold_batch_norm adds",
    ),
    Pass(
        run=merge_equal_calls,
        needs=(simplify,),
        reason="later patterns ask whether two arguments are one node",
    ),
    Pass(
        run=recognize_activations,
        needs=(merge_equal_calls,),
        reason="fold_batch_norm would take the factor of a written-out GELU into the linear after it",
    ),
    Pass(
        run=fold_batch_norm,
        needs=(fold_constants, join_batches, recognize_activations),
        reason="it leaves a convolution next to its ReLU, for the passes that fuse the two",
    ),
    Pass(
        run=join_branches,
        needs=(fold_batch_norm,),
        reason="a branch is a single convolution only once its norm is folded",
    ),
    Pass(
        run=fuse_attention,
        needs=(join_batches,),
        reason="it makes views, which simplify joins, and masks, which canonicalize_masks reads",
    ),
    Pass(
        run=canonicalize_masks,
        needs=(fuse_attention,),
        reason="the masks of written-out attention are arguments only once it is fused",
    ),
    Pass(
        run=drop_copies,
        needs=(fuse_attention,),
        reason="fused attention reads any strides, the products that it replaces do not",
    ),
    Pass(
        run=undo_row_orders,
        needs=(join_batches, drop_copies),
        reason="it depends on the strides of attention, which are those of queries once copies are gone",
    ),
    Pass(
        run=simplify,
        needs=(fuse_attention, undo_row_orders),
        reason="views of fused attention are joined with the model's, and transposes with those that were moved",
    ),
)
PRECISION = (
    Pass(
        run=cast,
        needs=(recognize_activations, fold_batch_norm, fuse_attention),
        takes=("dtype",),
        reason="patterns are found before casts lie between their calls, and folded weights are rounded once",
    ),
)
LAYOUT = (
    Pass(run=split_gradients, reason="layouts and kernels, which come later, handle one gradient each"),
    Pass(
        run=convolve_as_images,
        needs=(fold_batch_norm,),
        reason="a norm between a convolution and its activation would keep them apart",
    ),
    Pass(
        run=linear_convolutions,
        needs=(fold_batch_norm,),
        reason="fuse_convolutions would take those with a ReLU",
    ),
    Pass(
        run=propagate_channels_last,
        needs=(fold_batch_norm, convolve_as_images),
        reason="weights are laid out once they are final, and later passes rely on the final layout of images",
    ),
    Pass(
        run=block_transposed_convolutions,
        needs=(propagate_channels_last,),
        reason="it needs the final layout of its result, and later passes fuse the convolution that it leaves",
    ),
)
LIBRARY = (
    Pass(
        run=fuse_convolutions,
        needs=(fold_batch_norm, linear_convolutions, propagate_channels_last),
        reason="it tries each call on the device, with its final strides",
    ),
    Pass(
        run=fuse_activations,
        needs=(recognize_activations, fold_batch_norm, linear_convolutions),
        reason="after join_linears an activation reads a slice instead of the product",
    ),
    Pass(
        run=join_linears,
        needs=(fuse_activations,),
        reason="align_weights would pad each weight, though the joined one may need no padding",
    ),
    Pass(
        run=align_weights,
        needs=(join_linears, fuse_activations),
        reason="its slices would stand between a linear and its activation",
    ),
    Pass(
        run=pack_recurrent_weights,
        needs=(fold_constants,),
        reason="passes that replace constants would move the weights out of their buffer",
    ),
    Pass(
        run=lay_contiguous,
        needs=(propagate_channels_last, join_linears),
        reason="earlier passes change strides, as those of slices of joined linears, which some calls cannot read",
    ),
)
OUTPUTS = (
    Pass(
        run=merge_equal_calls,
        needs=(simplify,),
        reason="earlier passes make the same copy or constant for several readers",
    ),
    Pass(
        run=keep_outputs,
        needs=(merge_equal_calls, propagate_channels_last),
        takes=("strides",),
        reason="earlier passes merge two outputs, return inputs, and change strides",
    ),
)


def is_half(setting: Setting) -> bool:
    """Return whether the target computes in half precision."""
    return setting.dtype is not None


def _is_on_cuda(setting: Setting) -> bool:
    return setting.device == "cuda"


REWRITES = Pipeline(
    Phase(name="canonical", passes=CANONICAL, when=is_half),
    Phase(name="fuse", passes=FUSE, when=is_half),
    Phase(name="precision", passes=PRECISION, when=is_half),
    Phase(name="canonical", passes=CANONICAL),
    Phase(name="fuse", passes=FUSE),
    Phase(name="layout", passes=LAYOUT, when=_is_on_cuda),
    Phase(name="library", passes=LIBRARY, when=_is_on_cuda),
    Phase(name="outputs", passes=OUTPUTS),
)
"""The first pipeline above -O0. In half precision patterns are searched twice: in float32, and after the casts."""

REGIONS = Pipeline(
    Phase(
        name="fp8",
        passes=(Pass(run=write_fp8, reason="products and their norms have been chosen by now"),),
        when=lambda setting: setting.fp8,
    ),
    Phase(
        name="regions",
        passes=(
            Pass(run=mark_writes, reason="a region would copy a whole tensor to change one of its rows"),
            Pass(
                run=attend_to_caches,
                needs=(mark_writes,),
                reason="rows that may be written in place are marked, and regions would compute the rotation",
            ),
            Pass(
                run=lay_groups_contiguous,
                reason="kernels that read channels last have been chosen by now, and regions compute the copies",
            ),
            Pass(run=free_biases, reason="the regions that generate_regions forms add the biases"),
            Pass(run=rematerialize, reason="equal calls are no longer merged, and regions join the copies"),
            Pass(
                run=generate_regions,
                needs=(mark_writes, attend_to_caches, lay_groups_contiguous, free_biases, rematerialize),
                takes=("at_any_cost",),
                reason="no other pass knows what a region computes",
            ),
        ),
    ),
    Phase(
        name="state",
        passes=(
            Pass(
                run=write_state,
                needs=(generate_regions,),
                reason="every other pass assumes pure calls, which it may move or merge",
            ),
        ),
    ),
)
"""The last pipeline above -O0: generated kernels for all between the calls of libraries and kernels."""

FUSED_REGIONS = (REWRITES, REGIONS)
"""-O1: fewer kernels, and generated ones between the calls of libraries."""
