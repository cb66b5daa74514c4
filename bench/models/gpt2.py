"""GPT-2 small (transformers), random weights, 64 tokens, without a cache."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


class _Logits(torch.nn.Module):
    """The logits alone: a plan returns tensors."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, use_cache=False).logits


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    config = GPT2Config()
    return _Logits(GPT2LMHeadModel(config)).eval(), (torch.randint(0, config.vocab_size, (1, 64)),)


def bf16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """bfloat16."""
    module, inputs = fp32()
    return module.bfloat16(), inputs
