"""TinyLlama 1.1B (transformers), random weights, 64 tokens, without a cache: the prefill of a prompt."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.models.images import Model
from bench.models.texts import Outputs


def bf16() -> Model:
    """Return the network in bfloat16."""
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_key_value_heads=4)
    module = Outputs(LlamaForCausalLM(config), "logits", use_cache=False)
    return module.bfloat16().eval(), (torch.randint(0, config.vocab_size, (1, 64)),)
