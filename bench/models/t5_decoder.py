"""One step of a small T5's decoder (transformers), random weights: one token, and 16 of the encoder."""

import torch
from transformers import T5Config, T5ForConditionalGeneration


class _Logits(torch.nn.Module):
    """The next token's logits alone: a plan returns tensors."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        return self.model(encoder_outputs=(encoded,), decoder_input_ids=input_ids, use_cache=False).logits


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Build the model with attention as eager PyTorch runs it."""
    config = T5Config(d_model=256, d_kv=32, d_ff=512, num_layers=2, num_heads=8, vocab_size=1000, use_cache=False)
    tokens, encoded = torch.randint(0, config.vocab_size, (1, 1)), torch.randn(1, 16, config.d_model)
    return _Logits(T5ForConditionalGeneration(config)).eval(), (tokens, encoded)
