"""Networks of bench.models with all weights changed, by so little that values neither vanish nor overflow."""

from functools import partial
from typing import Any

import torch

from bench.reference import seeded

_SEED = 1
_SPREAD = 0.1


def redrawn(spec: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Return the network named ``package.module:callable`` with other weights, including those of its norms."""
    module, args, _ = seeded(spec, _SEED)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.mul_(1 + _SPREAD * (2 * torch.rand(tensor.shape) - 1).to(tensor.dtype))
                if name.endswith(("bias", "running_mean")):
                    tensor.add_(_SPREAD * torch.randn(tensor.shape).to(tensor.dtype))
    return module, args


resnet50, bert_base = (partial(redrawn, f"bench.models.{name}:fp16") for name in ("resnet50", "bert_base"))
