"""Language models of the library transformers, as modules of tokens and positions that hold their key-value cache."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache


class Cached(nn.Module):
    """A causal language model with a cache of ``length`` positions for each of ``batch`` sequences.

    ``caches`` names the buffers that hold it.
    """

    def __init__(self, model: Any, batch: int, length: int) -> None:
        super().__init__()
        self.model, self.length = model, length
        # The argument was renamed in transformers 5.
        self._cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.caches = [f"{name}_{layer}" for layer in range(config.num_hidden_layers) for name in ("key", "value")]
        for name in self.caches:
            empty = torch.zeros(batch, heads, length, width, dtype=model.dtype, device=model.device)
            self.register_buffer(name, empty)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (batch x steps x vocabulary) of tokens at their positions (both batch x steps)."""
        places = torch.arange(self.length, device=ids.device)
        least = torch.finfo(self.model.dtype).min
        mask = torch.where(places <= positions[:, None, :, None], 0.0, least).to(self.model.dtype)
        # The library makes no mask of its own for one of four dimensions.
        given = {self._cache: _Rows(self, positions), "attention_mask": mask, "use_cache": True}
        output = self.model(input_ids=ids, position_ids=positions, **given)
        logits: Tensor = output.logits
        return logits


class _Rows(Cache):  # type: ignore[misc, unused-ignore] # the library may be missing
    """The library's view of the cache: a layer writes its keys and values at the positions of the call."""

    def __init__(self, held: Cached, positions: Tensor) -> None:
        super().__init__(layers=[])
        self._held, self._positions = held, positions

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (batch x heads x steps x width), and return those of all positions."""
        held_keys, held_values = getattr(self._held, f"key_{layer}"), getattr(self._held, f"value_{layer}")
        at = self._positions[:, None, :, None].expand(keys.shape)
        held_keys.scatter_(2, at, keys)
        held_values.scatter_(2, at, values)
        return held_keys, held_values

    def get_seq_length(self, layer: int = 0) -> int:
        """Return 0: positions are given."""
        del layer
        return 0
