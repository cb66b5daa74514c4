"""An optimised model with our own kernels wherever they are faster on this GPU."""

from dataclasses import replace

from nimblec.frontend.pytorch.model import TorchModel
from nimblec.graph.rewriter import copied
from nimblec.optimize import own_norms
from nimblec.optimize.layout.channels_last import lay_float32_channels_last
from nimblec.optimize.own_attention import select_own_attention
from nimblec.optimize.own_concatenation import place_parts
from nimblec.optimize.own_kernels_choice import select_own_kernels
from nimblec.optimize.own_normed_products import absorb_norms
from nimblec.optimize.own_selection import Times
from nimblec.optimize.own_siblings import join_siblings


def with_own_products(model: TorchModel, times: Times) -> TorchModel:
    """With our attention, convolutions and products; attention first, as it may change strides."""
    module = copied(model.module)
    lay_float32_channels_last(module)
    select_own_attention(module, times)
    join_siblings(module)
    place_parts(module)
    select_own_kernels(module, times)
    return replace(model, module=module)


def with_own_norms(model: TorchModel, times: Times) -> TorchModel:
    """With our norms too: inside products where that can be, or by launches, with the sums that products have left."""
    module = copied(model.module)
    absorb_norms(module)
    own_norms.select_own_norms(module, times)
    return replace(model, module=module)


def has_own_kernels(model: TorchModel) -> bool:
    """Whether any call is of ours."""
    return any(getattr(node.target, "namespace", "") == "nimblec" for node in model.module.graph.nodes)


def has_norms(model: TorchModel) -> bool:
    """Whether there is a norm that ours could compute."""
    return any(own_norms.requests(model.module))
