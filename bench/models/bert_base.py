"""BERT-base (transformers), random weights, 128 tokens."""

from functools import partial
from typing import Any

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


def fp32(batch: int = 1) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    config = BertConfig()
    return _Hidden(BertModel(config)).eval(), (torch.randint(0, config.vocab_size, (batch, 128)),)


def fp16(batch: int = 1) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision."""
    module, inputs = fp32(batch)
    return module.half(), inputs


fp16_batch_4, fp16_batch_16, fp16_batch_64 = (partial(fp16, batch) for batch in (4, 16, 64))


def fp16_compiled() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision through torch.compile."""
    module, inputs = fp16()
    compiled: Any = torch.compile(module)
    return compiled, inputs
