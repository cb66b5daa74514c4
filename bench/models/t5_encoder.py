"""The encoder of T5-base (transformers), random weights, 128 tokens."""

import torch
from transformers import T5Config, T5EncoderModel

from bench.models.images import Model
from bench.models.texts import Outputs


def fp32() -> Model:
    """Return the network as eager PyTorch runs it."""
    config = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)  # the sizes of t5-base
    module = Outputs(T5EncoderModel(config), "last_hidden_state")
    return module.eval(), (torch.randint(0, config.vocab_size, (1, 128)),)


def bf16() -> Model:
    """Return the network in bfloat16: T5's activations exceed the range of half precision."""
    module, inputs = fp32()
    return module.bfloat16(), inputs
