"""The encoder of T5-base (transformers), random weights, 128 tokens."""

import torch
from transformers import T5Config, T5EncoderModel


class _Hidden(torch.nn.Module):
    """The last hidden state alone: a plan returns tensors."""

    def __init__(self, model: T5EncoderModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids).last_hidden_state


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    config = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)  # the sizes of t5-base
    return _Hidden(T5EncoderModel(config)).eval(), (torch.randint(0, config.vocab_size, (1, 128)),)


def bf16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """bfloat16, as T5's activations exceed the range of half precision."""
    module, inputs = fp32()
    return module.bfloat16(), inputs
