"""BERT-base (transformers), random weights, 128 tokens."""

import torch
from transformers import BertConfig, BertModel


class _Hidden(torch.nn.Module):
    """The last hidden state and the pooled one."""

    def __init__(self, model: BertModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(input_ids)
        return out.last_hidden_state, out.pooler_output


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision."""
    config = BertConfig()
    return _Hidden(BertModel(config).eval().half()), (torch.randint(0, config.vocab_size, (1, 128)),)


def fp16_compiled() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision through torch.compile."""
    module, inputs = fp16()
    return torch.compile(module), inputs
