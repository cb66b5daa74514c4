"""Transformers' networks of tokens, reduced to the outputs that are tensors."""

from typing import Any

import torch
from torch import nn


class Outputs(nn.Module):
    """A network of transformers that returns the outputs of these names: a plan returns tensors."""

    def __init__(self, model: nn.Module, *names: str, **given: Any) -> None:
        """Wrap a network, which also gets the arguments ``given``."""
        super().__init__()
        self.model, self._names, self._given = model, names, given

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        """Return one tensor, or a tuple of several."""
        outputs = self.model(input_ids, attention_mask=attention_mask, **self._given)
        found = tuple(getattr(outputs, name) for name in self._names)
        return found if len(found) > 1 else found[0]
