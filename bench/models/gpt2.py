"""GPT-2 small (transformers), random weights, 64 tokens, without a cache."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from bench.models.images import Model
from bench.models.texts import Outputs


def fp32() -> Model:
    """Return the network as eager PyTorch runs it."""
    config = GPT2Config()
    module = Outputs(GPT2LMHeadModel(config), "logits", use_cache=False)
    return module.eval(), (torch.randint(0, config.vocab_size, (1, 64)),)


def bf16() -> Model:
    """Return the network in bfloat16."""
    module, inputs = fp32()
    return module.bfloat16(), inputs
