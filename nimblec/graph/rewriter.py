"""Read and change a flat ATen graph: the verbs that all rewrites are written in."""

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import tree_leaves

from nimblec.base.places import joined
from nimblec.graph.definitions import INFERENCES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inference:
    """The result of a call and what it read: as text, and the values themselves, so that no identity is reused."""

    read: str
    values: tuple[Any, ...]
    result: Any


class Rewriter:
    """Changes one graph in place; every node keeps its ``meta["val"]``, a fake tensor, and its source."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self._mode = _fake_mode(self.graph)
        self._fresh = sum(1 for _ in module.buffers())

    def calls(self, *targets: OpOverload) -> list[fx.Node]:
        """Return the calls of these overloads, in order."""
        return [node for node in self.graph.nodes if is_call(node, *targets)]

    def value(self, node: Any) -> Tensor | None:
        """Return the tensor of a constant; None for anything else."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        return constant_of(self.module, node)

    def constant(self, tensor: Tensor, *, at: fx.Node) -> fx.Node:
        """Return a new constant, placed before ``at`` and named as coming from there."""
        while hasattr(self.module, f"folded_{self._fresh}"):
            self._fresh += 1
        name = f"folded_{self._fresh}"
        self.module.register_buffer(name, tensor.detach())
        with self.graph.inserting_before(at):
            node = self.graph.get_attr(name)
        with self._mode:
            value = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return _described(node, value, at)

    def call(self, target: Any, *args: Any, at: fx.Node, **kwargs: Any) -> fx.Node:
        """Return a new call, placed before ``at`` and named as coming from there."""
        with self.graph.inserting_before(at):
            node = self.graph.call_function(target, args, kwargs)
        return _described(node, self.infer(node), at)

    def infer(self, node: fx.Node) -> Any:
        """Return the results of a call as fake tensors; inferred again only where its arguments have changed."""
        given = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda n: f"value {id(n.meta['val'])}")
        read = f"{node.target} {given}"
        last: _Inference | None = node.meta.get("inference")
        if last is None or last.read != read:
            args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda n: n.meta["val"])
            infer: Any = INFERENCES.get(node.target, node.target)
            with self._mode, torch.no_grad():
                result = infer(*args, **kwargs)
            last = node.meta["inference"] = _Inference(read=read, values=(args, kwargs), result=result)
        return last.result

    def propagate(self) -> None:
        """Infer every call again whose arguments have changed, as after a change of strides."""
        for node in self.graph.nodes:
            if node.op == "call_function":
                node.meta["val"] = self.infer(node)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace ``old``, which is erased, by ``new``, of the same dtype and shape.

        ``new`` inherits the source of ``old``, and those of the calls that only ``old`` read.
        """
        assert _likeness(old) == _likeness(new), f"{old.format_node()} replaced by {new.format_node()}"
        old.replace_all_uses_with(new)
        _inherit(new, [node.meta.get("source", "") for node in _read_only_by(old) if views(node) is None])
        self.graph.erase_node(old)

    def finish(self) -> None:
        """Drop calls and constants that nothing uses, and check the graph."""
        self.graph.eliminate_dead_code()
        used = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        for name in _constants(self.module) - used:
            _delete(self.module, name)
        self.graph.lint()
        self.module.recompile()


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph to change, on the same constants, with the values and sources of its nodes.

    Python code is generated for it when it is first called, not after each of its rewrites.
    """
    return _LazyGraphModule(module, copy.deepcopy(module.graph), class_name=type(module).__name__)


def is_call(node: Any, *targets: OpOverload) -> bool:
    """Return whether ``node`` is a call of one of these overloads."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the one node that uses ``node``, once; None where there are several or none."""
    (user, *more) = node.users or (None,)
    return user if user is not None and not more and times_read(node, user) == 1 else None


def times_read(node: fx.Node, user: fx.Node) -> int:
    """Count the arguments of ``user`` that are ``node``; ``all_input_nodes`` names each of them once."""
    return sum(leaf is node for leaf in tree_leaves((user.args, user.kwargs)))


def bound(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a call by the names of its schema, defaults too."""
    arguments = _overload(node)._schema.arguments
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def argument_names(node: fx.Node) -> list[str]:
    """Return the names of a call's arguments, in the order of its schema."""
    return [described.name for described in _overload(node)._schema.arguments]


def _overload(node: fx.Node) -> OpOverload:
    assert isinstance(node.target, OpOverload), node.format_node()
    return node.target


def called(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """Return the result of a call that is made now, on real values of its arguments, without autograd."""
    target: Any = node.target
    args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), value)
    with torch.no_grad():
        return target(*args, **kwargs)


def argument(node: fx.Node, place: int) -> Any:
    """Return the positional argument of a call at this place, usually a node."""
    return node.args[place]


def fake(node: fx.Node) -> FakeTensor:
    """Return the fake tensor with the dtype, shape and strides of a node."""
    value: FakeTensor = node.meta["val"]
    return value


def views(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory the result of ``node`` may share; None for new or written memory."""
    if node.target is operator.getitem:
        return views(argument(node, 0))
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    if schema.is_mutable or not any(result.alias_info for result in schema.returns):
        return None
    return next((argument(node, n) for n, a in enumerate(schema.arguments[: len(node.args)]) if a.alias_info), None)


def owner(node: fx.Node) -> fx.Node:
    """Return the node whose memory ``node`` may share."""
    while (viewed := views(node)) is not None:
        node = viewed
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield all users of a value and of its views, the views included."""
    for user in node.users:
        yield user
        if views(user) is not None:
            yield from readers(user)


def is_pure(node: fx.Node) -> bool:
    """Return whether a call is deterministic and without side effects."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def constant_of(module: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return the tensor that a get_attr node reads."""
    path, _, name = str(node.target).rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), name)
    return tensor


def _likeness(node: fx.Node) -> Any:
    value = node.meta["val"]
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return [(part.dtype, tuple(part.shape)) if isinstance(part, Tensor) else part for part in parts]


def _described(node: fx.Node, value: Any, at: fx.Node) -> fx.Node:
    node.meta["val"] = value
    node.meta["source"] = at.meta.get("source", "")
    return node


def _read_only_by(node: fx.Node) -> list[fx.Node]:
    """Return the calls whose results only ``node`` depends on, in their order, and itself."""
    found = [node]
    for each in found:
        for read in each.all_input_nodes:
            if read.op == "call_function" and read not in found and all(user in found for user in read.users):
                found.append(read)
    return found[::-1]


def _inherit(node: fx.Node, sources: list[str]) -> None:
    """Add sources to the call whose result ``node`` is or views: it does what the calls from there did."""
    maker = owner(node)
    if maker.target is operator.getitem:
        maker = argument(maker, 0)
    if maker.op == "call_function":
        own = maker.meta.get("source", "")
        maker.meta["source"] = joined(sources if own in sources else [own, *sources], own)


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode()


def _constants(module: fx.GraphModule) -> set[str]:
    """Return the names of all tensors that the module holds; tied ones have several."""
    named = (*module.named_buffers(remove_duplicate=False), *module.named_parameters(remove_duplicate=False))
    return {name for name, _ in named}


def _delete(module: fx.GraphModule, name: str) -> None:
    path, _, last = name.rpartition(".")
    delattr(module.get_submodule(path), last)
