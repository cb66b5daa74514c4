"""DistilBERT (transformers), random weights, 128 tokens."""

import torch
from transformers import DistilBertConfig, DistilBertModel


class _Hidden(torch.nn.Module):
    """The last hidden state alone: a plan returns tensors."""

    def __init__(self, model: DistilBertModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Build the model with attention as eager PyTorch runs it."""
    config = DistilBertConfig(attn_implementation="eager")
    return _Hidden(DistilBertModel(config)).eval(), (torch.randint(0, config.vocab_size, (1, 128)),)
