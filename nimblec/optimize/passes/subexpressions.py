"""Common subexpressions: equal calls of equal arguments are made once."""

from typing import Any

from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, constant_of, is_pure


def merge_equal_calls(module: fx.GraphModule) -> None:
    """Keep the first of equal constants and of equal pure calls."""
    rewriter = Rewriter(module)
    first: dict[Any, fx.Node] = {}
    for node in list(module.graph.nodes):
        key = _key(module, node)
        if key is not None and first.setdefault(key, node) is not node:
            rewriter.replace(node, first[key])
    rewriter.finish()


def _key(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return a key that is equal for nodes of equal value; None for nodes that must not be merged."""
    if node.op == "get_attr":
        return "constant", _identity(constant_of(module, node))
    if node.op != "call_function" or not is_pure(node):
        return None
    return node.target, _hashable(node.args), _hashable(tuple(sorted(node.kwargs.items())))


def _identity(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _hashable(value: Any) -> Any:
    """Return arguments as a key; 1, 1.0 and True stay different, and so do 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    return type(value), repr(value) if isinstance(value, (float, complex)) else value
