"""Record tensor code as a flat graph of ATen calls, computing at once whatever is known.

A call whose tensors are all real runs on the CPU: that is constant folding. A call that touches a fake tensor, which
stands for a value of the running model, is written to the graph and returns fake tensors; its real tensors become
constants. So the graph holds no call that could run at import, no ``.item()`` and no copy from host to device.
"""

import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nimblec.graph.definitions import FAKES, RECURRENT
from nimblec.graph.views import lies_as
from nimblert.arrays.layouts import is_dense

aten = torch.ops.aten

WHOLE = frozenset({
    aten.reshape.default,
    aten.scaled_dot_product_attention.default,
    *RECURRENT,
})
"""Composite calls that stay one call: the first is a view or a copy, depending on strides; the others
pick fused kernels of the device."""

RESHAPES = frozenset({aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.expand.default})
"""Calls that do nothing if the shape stays the same."""

ALIASES = frozenset({aten.alias.default, aten.detach.default})
"""Calls that do nothing here."""

VIEWS_IN_PLACE = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
"""Calls that change only the strides of a value, and the calls that return such a view."""

AS_RESHAPE = frozenset({aten.view.default, aten._unsafe_view.default})
"""Written as ``reshape``, which holds for any strides that earlier kernels choose."""


class InPlaceError(RuntimeError):
    """A call writes into memory that more than one value has, or a constant, or an input.

    ``composite`` is the call that it is part of, if any.
    """

    def __init__(self, message: str, composite: torch._ops.OpOverload | None = None) -> None:
        super().__init__(message)
        self.composite = composite


class Recorder(TorchDispatchMode):
    """A dispatch mode that writes calls on fake tensors of ``device`` to ``graph``.

    ``source`` is put into ``meta["source"]`` of every call written while it is set;
    ``meta["val"]`` is the fake tensor, so that dtype, shape and strides of each value are known.
    """

    def __init__(self, device: torch.device) -> None:
        TorchDispatchMode.__init__(self)
        self.graph = fx.Graph()
        self.device = device
        self.source = ""
        self.constants: dict[str, Tensor] = {}
        self._fake_mode = FakeTensorMode()
        self._nodes: dict[int, fx.Node] = {}
        self._lifted: dict[int, FakeTensor] = {}
        self._labels: dict[int, str] = {}
        self._fixed: set[int] = set()
        self._given: set[int] = set()
        self._sharing: Counter[int] = Counter()
        self._kept: list[Tensor] = []
        self._guards: list[Any] = []
        self._around: Recorder | None = None
        self.captured: list[Tensor] = []
        """Values of the graph around this one that are arguments of it, in order."""

    def __enter__(self) -> Self:
        # Below autograd, composite calls arrive whole, and results carry no history.
        guard = torch._C._AutoDispatchBelowAutograd()
        guard.__enter__()
        self._guards.append(guard)
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *exc: object) -> None:
        TorchDispatchMode.__exit__(self, *exc)
        self._guards.pop().__exit__(*exc)

    def placeholder(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> FakeTensor:
        """Return a fake tensor for an input of the graph."""
        return self.receive(name, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def label(self, tensor: Tensor, name: str) -> None:
        """Name the real ``tensor``, for the ``source`` of its constant."""
        self._labels[id(tensor)] = name
        self._fixed.add(_storage(tensor))
        self._kept.append(tensor)

    def constant(self, tensor: Tensor) -> FakeTensor:
        """Return the fake tensor for a real one, which becomes a constant of the graph."""
        known = self._lifted.get(id(tensor))
        if known is not None:
            return known
        if tensor.device.type != "cpu":
            raise RuntimeError(f"a tensor on {tensor.device} was made at import; expected the CPU")
        name = f"constant_{len(self.constants)}"
        # Views with holes or overlaps would not keep their strides on their way to a device.
        dense = tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()
        self.constants[name] = dense
        fake = self._fake(dense)
        self._write(self.graph.create_node("get_attr", name), fake)
        self._nodes[id(fake)].meta["source"] = self._labels.get(id(tensor), self.source)
        self._lifted[id(tensor)] = fake
        self._fixed.add(_storage(tensor))
        self._given.add(_storage(fake))
        self._kept.append(tensor)
        return fake

    def inside(self) -> Self:
        """Return a recorder for the body of a loop or branch: what it reads of this graph becomes an argument."""
        inner = type(self)(self.device)
        inner._fake_mode, inner._around, inner.source = self._fake_mode, self, self.source
        inner._labels, inner._fixed = dict(self._labels), set(self._fixed)
        return inner

    def receive(self, name: str, example: Tensor) -> FakeTensor:
        """Return a fake tensor like ``example`` for an input of the graph."""
        fake = self._fake(example)
        self._take(name, fake)
        return fake

    def output(self, values: Sequence[Tensor]) -> None:
        """End the graph with ``values``, each in memory of its own.

        Views of an input, a constant or an earlier output are copied.
        """
        taken = self._given
        separate = []
        for value in values:
            fake = self._as_fake(value)
            own = fake.clone() if _storage(fake) in taken else fake
            taken.add(_storage(own))
            separate.append(self._nodes[id(own)])
        self.graph.output(tuple(separate))

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not (_makes_on(self.device, kwargs) or any(_has_fake(value) for value in (*args, *kwargs.values()))):
            given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            if func._schema.is_mutable and any(_storage(tensor) in self._fixed for tensor in given):
                raise InPlaceError(f"{func} writes into {self._labels.get(id(args[0]), 'a constant')}")
            return func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            # CUDA code caches by device index, which ``fake_device`` has.
            return args[0].fake_device
        if is_decomposed(func):
            with self:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if func._schema.is_mutable:
            return self._overwrite(func, args, kwargs)
        args = tuple(_map_tensors(value, self._as_fake) for value in args)
        kwargs = {key: _map_tensors(value, self._as_fake) for key, value in kwargs.items()}
        with self._fake_mode, _without_tracebacks():
            result = FAKES.get(func, func)(*args, **kwargs)
        if result is None:
            raise RuntimeError(f"{func} returns nothing: it checks values, which a plan cannot do")
        if func in ALIASES or (func in RESHAPES and result.shape == args[0].shape):
            self._know(result, self._nodes[id(args[0])])
            return result
        return self._record(func, args, kwargs, result)

    def _overwrite(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Write the functional form of ``func``, whose result becomes the value of its first argument."""
        written: Tensor = args[0]
        if func is aten.as_strided_.default and _has_strides(*args):
            return written  # pooling to one pixel marks its result as channels-last in this way
        view = VIEWS_IN_PLACE.get(func)
        plain = view or _plain(func)
        storage = _storage(written)
        # Neither another value nor an argument of the graph may share the memory.
        is_alone = self._sharing[storage] == 1 and storage not in self._given
        if plain is None or not isinstance(written, FakeTensor) or not (view or is_alone):
            raise InPlaceError(f"{func} writes into its arguments; expected a call that returns a new tensor")
        with self:
            result = plain(*args, **kwargs)
        if view:
            self._keep_value(written)
            with self._fake_mode:
                func(*args, **kwargs)
        if _described(result) != _described(written):
            raise InPlaceError(f"{func} keeps another dtype or layout than {plain} returns")
        self._nodes[id(written)] = self._nodes[id(result)]
        return written

    def _keep_value(self, fake: FakeTensor) -> None:
        """Have the call whose value it is keep its shape and strides of now."""
        node = self._nodes[id(fake)]
        with self._fake_mode:
            now = aten.alias.default(fake)
        for holder in (node, *node.all_input_nodes):
            value = holder.meta["val"]
            if value is fake:
                holder.meta["val"] = now
            elif isinstance(value, (list, tuple)):
                holder.meta["val"] = type(value)(now if part is fake else part for part in value)

    def record_call(self, target: Any, args: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
        """Write a call of ``target`` with several results like these, and return its results."""
        made: list[Tensor] = [self._fake(result) for result in results]
        self._record(target, tuple(args), {}, made)
        return made

    def _record(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> Any:
        def argument(tensor: Tensor) -> fx.Node:
            return self._nodes[id(self._as_fake(tensor))]

        written = aten.reshape.default if func in AS_RESHAPE else func
        node = self.graph.call_function(
            written,
            tuple(_map_tensors(value, argument) for value in args),
            {key: _map_tensors(value, argument) for key, value in kwargs.items()},
        )
        if isinstance(result, Tensor):
            self._write(node, result)
            return result
        node.meta["source"] = self.source
        node.meta["val"] = result
        for i, part in enumerate(result):
            if isinstance(part, Tensor):
                self._write(self.graph.call_function(operator.getitem, (node, i)), part)
        return result

    def _write(self, node: fx.Node, fake: Tensor) -> None:
        node.meta["source"] = self.source
        node.meta["val"] = fake
        self._know(fake, node)

    def _know(self, fake: Tensor, node: fx.Node) -> None:
        """Note which call a fake tensor is the value of, and keep it alive, so that its id stays unique."""
        self._nodes[id(fake)] = node
        self._sharing[_storage(fake)] += 1
        self._kept.append(fake)

    def _fake(self, tensor: Tensor) -> FakeTensor:
        with _disable_current_modes(), self._fake_mode:  # a recorder would record how the mode makes one
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        assert isinstance(fake, FakeTensor)
        return fake

    def _as_fake(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return self.constant(tensor)
        if id(tensor) not in self._nodes:
            self._capture(tensor)
        return tensor

    def _capture(self, tensor: FakeTensor) -> None:
        """Make a value of the graph around this one an argument, before all calls."""
        assert self._around is not None
        first = next((node for node in self.graph.nodes if node.op not in {"placeholder", "get_attr"}), None)
        with nullcontext() if first is None else self.graph.inserting_before(first):
            self._take(f"captured_{len(self.captured)}", tensor)
        self.captured.append(tensor)

    def _take(self, name: str, fake: Tensor) -> None:
        """Make a fake tensor an argument of the graph."""
        self._write(self.graph.placeholder(name), fake)
        self._given.add(_storage(fake))


def graph_module(recorder: Recorder, name: str, rewrite: Callable[[fx.Graph], object] | None = None) -> fx.GraphModule:
    """Return what was recorded as a module called ``name``, after a rewrite, with the constants that it uses."""
    graph = recorder.graph
    graph.eliminate_dead_code()
    if rewrite is not None:
        rewrite(graph)
    graph.lint()
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    constants = {name: tensor for name, tensor in recorder.constants.items() if name in used}
    return fx.GraphModule(on_device(constants, recorder.device), graph, class_name=name)


def _makes_on(device: torch.device, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call creates a tensor on ``device``, as composite calls do besides using their arguments."""
    on = kwargs.get("device")
    return isinstance(on, torch.device) and on.type == device.type != "cpu"


def _plain(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the functional form of an overload that writes into its first argument."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    plain = getattr(packet, func._overloadname, None)
    return plain if isinstance(plain, torch._ops.OpOverload) and not plain._schema.is_mutable else None


def _described(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from printing the traceback of a refused call: the error suffices."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _has_strides(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> bool:
    """Return whether ``tensor`` has these strides; those of axes of length 1 do not count."""
    same_shape = tuple(tensor.shape) == tuple(shape)
    return same_shape and lies_as(tensor, strides) and offset in (None, tensor.storage_offset())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@cache
def is_decomposed(func: torch._ops.OpOverload) -> bool:
    """Return whether a call is decomposed by the dispatcher itself, not by Python, and should be."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return func not in WHOLE and has_kernel(func.name(), "CompositeImplicitAutograd")


def _has_fake(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_fake(item) for item in value)
    return isinstance(value, FakeTensor)


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [_map_tensors(item, function) for item in value]
    return value


def on_device(constants: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move constants; those that share a storage share one on the device, where that saves memory."""
    if device.type == "cpu":
        return dict(constants)
    groups: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, tensor in constants.items():
        groups.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(name)
    moved: dict[str, Tensor] = {}
    for names in groups.values():
        first = constants[names[0]]
        whole = first.untyped_storage().nbytes() // first.element_size()
        if sum(constants[name].numel() for name in names) <= whole:
            moved.update((name, constants[name].to(device)) for name in names)
            continue
        base = first.as_strided((whole,), (1,), 0).to(device)
        for name in names:
            view = constants[name]
            moved[name] = base.as_strided(view.shape, view.stride(), view.storage_offset())
    return moved
