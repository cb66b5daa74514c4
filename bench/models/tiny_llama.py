"""TinyLlama 1.1B (transformers), random weights, 64 tokens, without a cache: the prefill of a prompt."""

import torch

from bench.models.images import Model
from bench.models.texts import Outputs
from samples.text import tiny_llama


def bf16() -> Model:
    """Return the network in bfloat16."""
    model = tiny_llama().bfloat16()
    return Outputs(model, "logits", use_cache=False).eval(), (torch.randint(0, model.config.vocab_size, (1, 64)),)
