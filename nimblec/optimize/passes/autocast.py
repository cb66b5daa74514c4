"""Which calls run in half precision and which in float32, by the names of their ATen operators.

The source is torch.autocast: the lists "CUDA Ops that can autocast" of the documentation of
torch.amp, and aten/src/ATen/autocast_mode.h. What differs from it is said below.
"""

from torch import fx
from torch._ops import OpOverload


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HALF = _names("""
    mm bmm addmm addbmm baddbmm mv addmv dot vdot addr linear matmul _addmm_activation
    convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu cudnn_convolution_transpose
    scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention_for_cpu
    prelu _prelu_kernel lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell
""")
"""Always in half precision: autocast's list, and attention, which accumulates in float32."""

OUTER = _names("mm bmm")
"""Those of them that are pointwise where the inner length is 1, as for the angles of rotary positions."""

SINGLE = _names("""
    pow exp exp2 expm1 log log10 log1p log2 rsqrt reciprocal acos asin cosh sinh tan erfinv softplus
    sum nansum prod cumsum cumprod logcumsumexp logsumexp norm linalg_vector_norm renorm dist
    binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss huber_loss
    nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward kl_div soft_margin_loss multi_margin_loss
    multilabel_margin_loss_forward poisson_nll_loss
    var std var_mean std_mean
    _cdist_forward _pdist_forward _ctc_loss cholesky cholesky_inverse cholesky_solve inverse qr geqrf ormqr
    lu_unpack triangular_solve histc bucketize searchsorted igamma igammac
    complex polar view_as_complex view_as_real
    grid_sampler_2d grid_sampler_3d cudnn_grid_sampler affine_grid_generator
""")
"""Always in float32: autocast's list; ``var`` and ``std``, whose squares overflow float16 from 256
on; what CUDA has no half kernels for; and positions in images, for which half precision is too coarse.

Not on it, though autocast's: softmax, layer and group norms. Their CUDA kernels take half and
accumulate in float32 (SoftMax.cu, layer_norm_kernel.cu, group_norm_kernel.cu), as batch norms
(Normalization.cuh) and ``mean`` (ReduceMomentKernel.cu) do.
"""

SINGLE_FAMILIES = (
    *("linalg_", "_linalg_", "fft_", "_fft_", "special_", "mkldnn_"),
    *("quantize_", "fake_quantize_", "_fake_quantize_", "dequantize"),
)
"""Prefixes of names that are in float32 too."""

JOINS = _names("""
    cat stack where masked_fill masked_scatter index_put _unsafe_index_put index_copy index_fill scatter
    slice_scatter select_scatter diagonal_scatter as_strided_scatter
""")
"""Calls that copy: rounding their arguments is rounding their results. autocast promotes them instead."""

BATCH_NORMS = _names("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training")

BOUNDED = BATCH_NORMS | _names("""
    sin cos tanh sigmoid hardsigmoid erf atan sign softmax _softmax _safe_softmax
    native_layer_norm native_group_norm
""")
"""Calls whose results are bounded, so that half precision holds them well whatever their arguments."""

ACCUMULATIONS = _names("sum nansum prod cumsum cumprod")
"""Calls that sum half precision into float32 by their argument ``dtype``."""

SUMS = _names("sum mean cumsum")
ROUNDINGS = _names("round floor ceil trunc")
PRODUCTS = _names("mul div addcmul addcdiv")
BOUNDS = _names("clamp clamp_min clamp_max hardtanh")
SOFTMAXES = _names("_softmax _safe_softmax _log_softmax")
ATTENTIONS = _names("scaled_dot_product_attention")

FILLS = _names("""
    full full_like new_full zeros zeros_like new_zeros ones ones_like new_ones empty empty_like new_empty
    fill masked_fill index_fill constant_pad_nd where scatter
""")
"""Calls that fill in a number without computing with it."""


def name(node: fx.Node) -> str:
    """Return the operator of a call, with its namespace unless that is ATen's."""
    if not isinstance(node.target, OpOverload):
        return ""
    return str(node.target._schema.name).removeprefix("aten::")


def is_single(node: fx.Node) -> bool:
    """Return whether a call runs in float32 only, as do all that are not ATen's: nothing is known of those."""
    operator = name(node)
    return operator in SINGLE or operator.startswith(SINGLE_FAMILIES) or "::" in operator
