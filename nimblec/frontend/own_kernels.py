"""An optimised model with Triton kernels wherever they are faster on this GPU."""

from dataclasses import replace

from nimblec.frontend.pytorch.model import TorchModel
from nimblec.graph.rewriter import copied
from nimblec.kernels.core.gpu import GPU
from nimblec.kernels.core.launch import ops
from nimblec.kernels.core.selector import Times
from nimblec.kernels.families import FAMILIES
from nimblec.optimize.layout.channels_last import lay_float32_channels_last


def with_triton_kernels(model: TorchModel, times: Times) -> TorchModel:
    """With those families whose kernels gain if they are faster than the framework's."""
    module, gpu = copied(model.module), GPU.current()
    lay_float32_channels_last(module)
    for family in FAMILIES:
        if not family.needs_whole_plan:
            family.select(module, gpu, times)
    return replace(model, module=module)


def with_triton_norms(model: TorchModel, times: Times) -> TorchModel:
    """With the other families too: norms inside products where that can be, or by launches."""
    module, gpu = copied(model.module), GPU.current()
    for family in FAMILIES:
        if family.needs_whole_plan:
            family.select(module, gpu, times)
    return replace(model, module=module)


def has_triton_kernels(model: TorchModel) -> bool:
    """Whether any call is of theirs."""
    return any(node.target in ops() for node in model.module.graph.nodes)


def has_norms(model: TorchModel) -> bool:
    """Whether there is a call that the other families could compute."""
    return any(any(family.requests(model.module)) for family in FAMILIES if family.needs_whole_plan)
