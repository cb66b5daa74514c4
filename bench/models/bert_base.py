"""BERT-base (transformers), random weights, 128 tokens."""

import torch
from transformers import BertConfig, BertModel

from bench.models.images import Model, batches
from bench.models.texts import Outputs


def fp32(batch: int = 1) -> Model:
    """Return the network as eager PyTorch runs it."""
    config = BertConfig()
    module = Outputs(BertModel(config), "last_hidden_state", "pooler_output")
    return module.eval(), (torch.randint(0, config.vocab_size, (batch, 128)),)


def fp16(batch: int = 1) -> Model:
    """Return the network in half precision."""
    module, inputs = fp32(batch)
    return module.half(), inputs


fp16_batch_4, fp16_batch_16, fp16_batch_64 = batches(fp16)
