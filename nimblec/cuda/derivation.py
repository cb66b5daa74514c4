"""Derivations: the calls that computed constants from weights, as observed by a dispatch mode.

A memory is identified by the call that made it, and a tensor is a strided part of a memory, so views need
not be followed.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nimblec.graph.writes import written_values
from nimblert.arrays.layouts import dense_strides, is_dense

aten = torch.ops.aten

_MOVES = frozenset({
    aten.alias.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.permute.default,
    aten.reshape.default,
    aten._to_copy.default,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.dtype,
})
"""Calls that only move elements, if the dtype stays the same."""

_MOST_FIXED_NBYTES = 1 << 20
"""Recipes read tensors that depend on no weight up to this size."""

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """A storage, described by the first tensor in it, which spans it.

    ``node`` is that tensor in the graph, None if no call describes the current contents; ``lies`` are its shape,
    strides and offset. ``sources`` are the names of the weights that the contents depend on.
    """

    storage: StorageWeakRef
    node: fx.Node | None
    dtype: torch.dtype
    lies: tuple[Any, ...]
    count: int
    sources: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """``module`` computes memories, each as one axis, from the weights ``sources``, in this order.

    ``parts`` are the sources of each memory.
    """

    module: fx.GraphModule
    sources: tuple[str, ...]
    parts: tuple[frozenset[str], ...]

    def __call__(self, weights: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the memories, for these weights."""
        with torch.no_grad():
            made: tuple[Tensor, ...] = self.module(*(weights[name] for name in self.sources))
        return made


class Derivations(TorchDispatchMode):
    """Observes all calls on weights while it is entered.

    ``baked`` are the weights of which a number became part of the program, where it cannot be replaced.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.baked: frozenset[str] = frozenset()
        self._graph = fx.Graph()
        self._fixed = torch.nn.Module()
        self._known: dict[int, _Memory] = {}
        self._weights: dict[str, fx.Node] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Register a tensor, dense and spanning its memory, as a weight; tensors of one name are the same weight.

        Recipes take weights in C order, and bring them into the tensor's layout.
        """
        if name not in self._weights:
            self._weights[name] = self._graph.placeholder(f"weight_{len(self._weights)}")
            self._weights[name].meta["weight"] = name
        node = self._weights[name]
        if not tensor.is_contiguous():
            order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
            node = self._graph.call_function(aten.permute.default, (node, order))
            node = self._graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            node = self._graph.call_function(aten.as_strided.default, (node, *map(_plain, _lies(tensor))))
        self._know(tensor, node, frozenset({name}))

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_real = not any(isinstance(tensor, FakeTensor) for tensor in given)
        read = [memory for memory in map(self._memory, given) if memory is not None] if is_real else []
        result = func(*args, **kwargs)
        if not read:
            return result
        sources = frozenset[str]().union(*(memory.sources for memory in read))
        if func is aten._local_scalar_dense.default and not isinstance(result, bool):
            self.baked |= sources
        is_told = all(memory.node is not None for memory in read) and all(map(self._is_readable, given))
        if func._schema.is_mutable:
            self._know_written(func, args, kwargs, sources, is_told=is_told)
        else:
            old = set(map(_storage, given))
            if any(isinstance(leaf, Tensor) and _storage(leaf) not in old for leaf in tree_leaves(result)):
                node = self._call(func, args, kwargs, self._argument) if is_told else None
                self._know_results(node, result, old, sources)
        return result

    def sources(self, tensor: Tensor) -> frozenset[str]:
        """Return the weights that the memory of a tensor depends on."""
        memory = self._memory(tensor)
        return frozenset() if memory is None else memory.sources

    def is_told(self, tensor: Tensor) -> bool:
        """Return whether the calls that computed the memory of a tensor from weights are known."""
        memory = self._memory(tensor)
        return memory is not None and memory.node is not None

    def recipe(self, tensors: Iterable[Tensor], *, on: torch.device | None = None) -> Derivation:
        """Return the recipe for the memories of tensors with known calls, on a device or where each was made (None)."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        memories = [memory for memory in map(self._memory, tensors) if memory is not None]
        wanted = {memory.node for memory in memories}
        for node in reversed(self._graph.nodes):
            if node in wanted:
                wanted.update(node.all_input_nodes)
        for node in self._graph.nodes:
            if node in wanted:
                made[node] = graph.node_copy(node, lambda n: made[n])
                if on is not None:
                    moved = tree_map_only(torch.device, lambda _: on, (made[node].args, made[node].kwargs))
                    made[node].args, made[node].kwargs = moved
        outputs = []
        for memory in memories:
            assert memory.node is not None
            whole = graph.call_function(aten.as_strided.default, (made[memory.node], [memory.count], [1], 0))
            outputs.append(graph.call_function(aten.clone.default, (whole,)))
        graph.output(tuple(outputs))
        read = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        fixed = {name: self._fixed.get_buffer(name).to(on) for name in read}
        return Derivation(
            module=fx.GraphModule(fixed, graph, class_name="Derivation"),
            sources=tuple(node.meta["weight"] for node in graph.nodes if node.op == "placeholder"),
            parts=tuple(memory.sources for memory in memories),
        )

    def _memory(self, tensor: Tensor) -> _Memory | None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return None
        memory = self._known.get(_storage(tensor))
        return None if memory is None or memory.storage.expired() else memory

    def _know(self, tensor: Tensor, node: fx.Node | None, sources: frozenset[str]) -> None:
        storage = tensor.untyped_storage()
        self._known[_storage(tensor)] = _Memory(
            storage=StorageWeakRef(storage),
            node=node,
            dtype=tensor.dtype,
            lies=_lies(tensor),
            count=storage.nbytes() // tensor.element_size(),
            sources=sources,
        )

    def _know_results(self, node: fx.Node | None, result: Any, old: set[int], sources: frozenset[str]) -> None:
        """Register the new memories among the results of a call."""
        several = isinstance(result, list | tuple)
        for number, tensor in enumerate(result if several else [result]):
            if isinstance(tensor, Tensor) and _storage(tensor) not in old:
                item = self._graph.call_function(operator.getitem, (node, number)) if several and node else node
                self._know(tensor, item, sources)

    def _know_written(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], sources: frozenset[str], *, is_told: bool
    ) -> None:
        """Register the memories that a call wrote; a recipe makes the call on a copy, which replaces the memory."""
        written = [value for value in written_values(func, args, kwargs) if isinstance(value, Tensor)]
        whole = self._memory(written[0]) if len(written) == 1 and _returns_written(func) else None
        if not is_told or whole is None or not _is_all(whole) or whole.dtype is not written[0].dtype:
            for tensor in written:
                self._know(tensor, None, sources)
            return
        copy = self._graph.call_function(aten.clone.default, (whole.node,))
        part = self._graph.call_function(aten.as_strided.default, (copy, *map(_plain, _lies(written[0]))))
        changed = self._call(func, args, kwargs, lambda t: part if t is written[0] else self._argument(t))
        node = self._graph.call_function(aten.as_strided.default, (changed, *map(_plain, whole.lies)))
        self._known[_storage(written[0])] = replace(whole, node=node, sources=sources)

    def _call(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], node_of: Callable[[Tensor], fx.Node]
    ) -> fx.Node:
        return self._graph.call_function(func, *tree_map_only(Tensor, node_of, (args, kwargs)))

    def _is_readable(self, tensor: Tensor) -> bool:
        """Return whether a recipe may read a tensor: one that depends on weights, or a small one."""
        return self._memory(tensor) is not None or tensor.nbytes <= _MOST_FIXED_NBYTES

    def _argument(self, tensor: Tensor) -> fx.Node:
        """Return the node for a tensor that a call reads."""
        memory = self._memory(tensor)
        if memory is None:
            name = f"fixed_{len(self._graph.nodes)}"
            self._fixed.register_buffer(name, tensor.detach())
            return self._graph.get_attr(name)
        assert memory.node is not None
        if memory.lies == _lies(tensor) and memory.dtype is tensor.dtype:
            return memory.node
        node = memory.node
        if memory.dtype is not tensor.dtype:
            node = self._graph.call_function(aten.view.dtype, (node, tensor.dtype))
        return self._graph.call_function(aten.as_strided.default, (node, *map(_plain, _lies(tensor))))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def _returns_written(func: OpOverload) -> bool:
    """Return whether a call returns only the one tensor that it writes."""
    returned = [each.alias_info for each in func._schema.returns]
    return len(returned) == 1 and returned[0] is not None and returned[0].is_write


def _is_all(memory: _Memory) -> bool:
    """Return whether the first tensor in a memory covers it without gaps, so that a copy has the same layout."""
    shape, strides, offset = memory.lies
    return is_dense(shape, strides) and not offset and prod(shape) == memory.count


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def strides_of_moved(recipe: Derivation, weight: Tensor) -> tuple[int, ...] | None:
    """Return the strides, in elements, of a recipe's only weight in its only memory; None unless that is a copy."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(recipe.module.graph, {}))
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and not _is_move(node, weight.dtype)):
            return None
        node.args, node.kwargs = tree_map_only(torch.dtype, lambda _: torch.int64, (node.args, node.kwargs))
        node.args, node.kwargs = tree_map_only(torch.device, lambda _: _HOST, (node.args, node.kwargs))
    numbers = torch.arange(weight.numel()).reshape(weight.shape)
    (found,) = fx.GraphModule(torch.nn.Module(), graph)(numbers)
    if found.numel() != numbers.numel():
        return None
    places = torch.empty_like(found).scatter_(0, found, torch.arange(found.numel()))
    steps = zip(weight.shape, dense_strides(weight.shape), strict=True)
    strides = tuple(int(places[step]) if size > 1 else 1 for size, step in steps)
    if not is_dense(weight.shape, strides):
        return None
    laid = torch.empty_strided(weight.shape, strides, dtype=torch.int64).copy_(numbers)
    return strides if torch.equal(laid.as_strided(found.shape, (1,)), found) else None


def _is_move(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether a call only moves elements, and keeps the dtype."""
    leaves = tree_leaves((node.args, node.kwargs))
    return node.target in _MOVES and all(leaf is dtype for leaf in leaves if isinstance(leaf, torch.dtype))
