"""The position of the walk over an ONNX model, and the values known there."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Scope = MutableMapping[str, Any]
"""Values by name: a tensor (fake while it is not known), a list of tensors, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The position of the walk: the opsets in force, the attributes of the function, the depth."""

    opsets: Mapping[str, int]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    within: str = ""
    depth: int = 0
