"""Language models of transformers, compiled to generate whole texts in one call.

    nimblec compile samples.text:gpt2 -o gpt2.plan --target cpu

The weights are random; ``from_pretrained`` in place of the constructors gives trained ones.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import nimblec

Entries = Mapping[str, tuple[Any, ...]]


def gpt2() -> Entries:
    """GPT-2's 124 million parameters: prompts of up to 64 tokens, the most likely token each time."""
    torch.manual_seed(0)
    return nimblec.generate(GPT2LMHeadModel(GPT2Config()).eval(), prompts=(16, 64), max_new_tokens=128)


def llama() -> Entries:
    """`tiny_llama` in bfloat16: prompts of up to 64 tokens; tokens are drawn."""
    torch.manual_seed(0)
    model = tiny_llama().to(torch.bfloat16)
    return nimblec.generate(model, prompts=(16, 64), max_new_tokens=128, eos=2, temperature=0.8, top_p=0.95)


def tiny_llama() -> LlamaForCausalLM:
    """Return a Llama of 1.1 billion parameters with grouped queries (TinyLlama's sizes)."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2_048,
        intermediate_size=5_632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).eval()
