"""Where the walk over an ONNX model is, and what it knows there."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Scope = MutableMapping[str, Any]
"""Values by name: a tensor (fake while it is not known), a list of tensors, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where the walk is: the opsets in force, the attributes of the function, how deep."""

    opsets: Mapping[str, int]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    within: str = ""
    depth: int = 0
