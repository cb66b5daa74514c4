"""The functions of an ONNX model: how many nodes they expand to once they are inlined.

Functions that each call the next one twice double the nodes at every step, so a file of a few kilobytes
may expand to more nodes than any machine can hold.
"""

from collections.abc import Iterator
from typing import TypeAlias

from onnx import FunctionProto, ModelProto, NodeProto

from nimblec.base.errors import UnsupportedModelError
from nimblec.onnx_import import model_nodes

_MOST_NODES = 1_000_000
_DEEPEST = 100

_Key: TypeAlias = tuple[str, str, str]
"""Domain, name and overload."""


def check_functions(model: ModelProto) -> None:
    """Raise UnsupportedModelError if functions recurse, or expand to more nodes than can be compiled."""
    counter = _Counter({(function.domain, function.name, function.overload): function for function in model.functions})
    counter.count(model_nodes.nodes(model.graph), ())


class _Counter:
    def __init__(self, functions: dict[_Key, FunctionProto]) -> None:
        self._functions = functions
        self._counts: dict[_Key, int] = {}

    def count(self, nodes: Iterator[NodeProto], callers: tuple[_Key, ...]) -> int:
        """The number of nodes that ``nodes`` expand to; ``callers`` are the functions around them, outermost first."""
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            total += self._of_function(key, callers) if key in self._functions else 1
            if total > _MOST_NODES:
                raise UnsupportedModelError(
                    f"{_name(callers)} expands to more than {_MOST_NODES:,} nodes once the functions that it "
                    "calls are inlined: export the model with fewer or smaller functions"
                )
        return total

    def _of_function(self, key: _Key, callers: tuple[_Key, ...]) -> int:
        if key in self._counts:
            return self._counts[key]
        if key in callers:
            raise UnsupportedModelError(f"{_name((key,))} calls itself, which ONNX does not allow")
        if len(callers) >= _DEEPEST:
            raise UnsupportedModelError(f"{_name((key,))}: functions call each other more than {_DEEPEST} levels deep")
        inner = self._functions[key]
        self._counts[key] = self.count(model_nodes.nodes(inner), (*callers, key))
        return self._counts[key]


def _name(callers: tuple[_Key, ...]) -> str:
    return f"function {'.'.join(filter(None, callers[-1]))!r}" if callers else "the model"
