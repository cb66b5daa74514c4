"""BERT-base in JAX, with the weights of bench.models.bert_base, 128 tokens.

Each callable returns (function, (weights, input_ids)), the arrays being NumPy's. Norms and softmax are computed in
float32, as on torch's GPU kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax import numpy as jnp

from bench.models import bert_base

Weights: TypeAlias = dict[str, np.ndarray]
"""By their names in torch."""
Network: TypeAlias = tuple[Callable[..., Any], tuple[Weights, np.ndarray]]

_LAYERS = 12
_HEADS = 12
_EPSILON = 1e-12


def hidden_states(
    weights: Weights, input_ids: jax.Array, *, attention: Literal["xla", "cudnn"] = "xla"
) -> tuple[jax.Array, jax.Array]:
    """Map (batch, tokens) to (batch, tokens, 768) and (batch, 768) (Devlin et al., 2019); no token is masked.

    ``attention``: by XLA's own fusions, or by cuDNN's kernel on a GPU, which takes half precision alone.
    """
    names = ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight")
    words, positions, kinds = (weights[f"embeddings.{name}"] for name in names)
    x = jnp.take(words, input_ids, axis=0) + (positions[: input_ids.shape[1]] + kinds[0])
    x = _norm(weights, "embeddings.LayerNorm", x)
    for index in range(_LAYERS):
        name = f"encoder.layer.{index}"
        mixed = _attention(weights, f"{name}.attention.self", x, attention)
        x = _norm(
            weights,
            f"{name}.attention.output.LayerNorm",
            _linear(weights, f"{name}.attention.output.dense", mixed) + x,
        )
        wide = jax.nn.gelu(_linear(weights, f"{name}.intermediate.dense", x), approximate=False)
        x = _norm(weights, f"{name}.output.LayerNorm", _linear(weights, f"{name}.output.dense", wide) + x)
    return x, jnp.tanh(_linear(weights, "pooler.dense", x[:, 0]))


def _attention(weights: Weights, name: str, x: jax.Array, attention: Literal["xla", "cudnn"]) -> jax.Array:
    implementation = attention if x.dtype.itemsize == 2 else "xla"
    heads = (*x.shape[:2], _HEADS, -1)
    query, key, value = (_linear(weights, f"{name}.{part}", x).reshape(heads) for part in ("query", "key", "value"))
    return jax.nn.dot_product_attention(query, key, value, implementation=implementation).reshape(x.shape)


def _linear(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    normed = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + _EPSILON)
    return (normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]).astype(x.dtype)


def fp32(batch: int = 1) -> Network:
    """Build the network in single precision."""
    module, (input_ids,) = bert_base.fp32(batch)
    weights = {name.removeprefix("model."): tensor.detach().numpy() for name, tensor in module.named_parameters()}
    return hidden_states, (weights, input_ids.numpy().astype(np.int32))


def fp16(batch: int = 1) -> Network:
    """Build the network in half precision."""
    function, (weights, input_ids) = fp32(batch)
    return function, ({name: array.astype(np.float16) for name, array in weights.items()}, input_ids)


def fp16_cudnn_attention(batch: int = 1) -> Network:
    """Build the network in half precision, with attention by cuDNN."""
    function, arrays = fp16(batch)
    return partial(function, attention="cudnn"), arrays
