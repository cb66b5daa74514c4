"""Compute a float32 model in half precision; its inputs and outputs keep their dtypes.

Calls run in the precision that torch.autocast gives them (`nimblec.optimize.passes.autocast`); calls on none of its
lists follow their arguments. A result of the float32 list stays in float32 until a matrix product, a bounded function,
or a call that joins it with half precision, which computes in float32 and rounds. So do the author's own casts to
float32, numbers made of integers, squares that are summed, and what is rounded to whole numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.outputs import output_strides, restore_strides
from nimblec.graph.rewriter import Rewriter, argument, fake, is_call
from nimblec.graph.vocabulary import is_tagged_pointwise
from nimblec.optimize.passes import autocast
from nimblec.optimize.passes.precision_nodes import (
    Kernels,
    added_to_scores,
    all_users,
    dtypes_of,
    is_copy,
    is_integer,
    is_square,
    is_widened,
    rank_of,
    shapes_of,
)

aten = torch.ops.aten

_TO = aten._to_copy.default
_REFUSALS = (RuntimeError, TypeError, ValueError)


def cast(module: fx.GraphModule, dtype: torch.dtype) -> None:
    """Compute a flat graph in ``dtype``, torch.float16 or torch.bfloat16; inputs and outputs keep their dtypes.

    Weights are rounded once, each input is cast once and each output once. Finite numbers beyond
    the range of ``dtype``, which hide scores of an attention, become half of its lowest: that leaves
    room for the scores added to them, and a row whose scores are all hidden stays finite. float64,
    complex numbers and what is in half precision already stay. Raises UnsupportedModelError where
    a call supports neither precision.
    """
    strides = output_strides(module)
    caster = _Caster(module, dtype)
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            caster.visit(node)
    caster.restore_outputs()
    caster.rewriter.finish()
    restore_strides(module, strides)


class _Mode(Enum):
    """The precision in which a call runs."""

    HALF = "half"
    SINGLE = "single"
    JOINED = "joined"
    """Computed in float32 from arguments of both; readers take its result in half precision."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The arguments of a call in one precision, and the dtype that its first result must then have."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: torch.dtype


class _Values:
    """The values of one graph, and their casts.

    ``before`` are the dtypes that the model gave to the results of a node. ``wide`` are float32 values whose readers
    take them in float32; other values may be in float32 too, but are read in half precision. ``masks`` are added to
    the scores of an attention; ``huge`` may hold finite numbers beyond the range of half precision. ``casts`` are
    nodes by the node that they cast, and by dtype.
    """

    def __init__(self, module: fx.GraphModule, dtype: torch.dtype) -> None:
        self.rewriter = Rewriter(module)
        self.half = dtype
        self.most = torch.finfo(dtype).max
        self.before = {node: dtypes_of(node.meta.get("val")) for node in module.graph.nodes}
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.wide: set[fx.Node] = set()
        self.masks = added_to_scores(module.graph)
        self.huge = {node for node in self.masks if node.op == "placeholder"}
        self._rounded: dict[tuple[Any, ...], Tensor] = {}

    def floats(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments that were float32 and depend on an input."""
        return [n for n in node.all_input_nodes if n.op != "get_attr" and self.before[n] == (torch.float32,)]

    def constants(self, node: fx.Node) -> list[fx.Node]:
        """Return the float32 constants among the arguments."""
        return [n for n in node.all_input_nodes if n.op == "get_attr" and self.before[n] == (torch.float32,)]

    def is_rounded_first(self, node: fx.Node) -> bool:
        """Return whether it is a mask, or hides scores as one does, and may be rounded to half precision."""
        return node in self.masks or node in self.huge

    def is_huge(self, value: Any) -> bool:
        """Return whether a number or a constant holds finite numbers beyond the range of half precision."""
        if isinstance(value, fx.Node):
            constant = self.rewriter.value(value)
            if constant is None or constant.dtype != torch.float32:
                return value in self.huge
            return bool(((constant.abs() > self.most) & constant.isfinite()).any())
        return isinstance(value, float) and self.most < abs(value) < float("inf")

    def remember(self, node: fx.Node) -> None:
        """Note that readers take the result in float32, and whether it may be huge."""
        if torch.float32 in dtypes_of(node.meta["val"]):
            self.wide.add(node)
        keeps = is_tagged_pointwise(node) or is_copy(node) or autocast.name(node) in autocast.JOINS
        if keeps and autocast.name(node) not in autocast.BOUNDS:
            parts = tree_leaves((node.args, node.kwargs))
            self.huge.update([node] if any(map(self.is_huge, parts)) else [])

    def in_dtype(self, node: fx.Node, dtype: torch.dtype, at: fx.Node) -> fx.Node:
        """Return ``node`` in ``dtype``; a cast is made once, before the first call ``at`` that needs it."""
        if fake(node).dtype == dtype:
            return node
        if (node, dtype) not in self.casts:
            made = self._cast(node, dtype, at)
            made.meta["source"] = made.meta.get("source") if made in self.before else node.meta.get("source", "")
            self.before.setdefault(made, (dtype,))
            self.casts[node, dtype] = made
        return self.casts[node, dtype]

    def _cast(self, node: fx.Node, dtype: torch.dtype, at: fx.Node) -> fx.Node:
        if (constant := self.rewriter.value(node)) is not None:
            return self.rewriter.constant(self._round(constant), at=at)
        if is_widened(node, dtype):
            return argument(node, 0)
        # The argument of an expansion has fewer elements to cast.
        if is_call(node, aten.expand.default):
            return self.rewriter.call(node.target, self.in_dtype(argument(node, 0), dtype, at), *node.args[1:], at=at)
        if node in self.huge and dtype == self.half:
            node = self.rewriter.call(aten.clamp.default, node, -self.most / 2, self.most / 2, at=at)
        return self.rewriter.call(_TO, node, dtype=dtype, at=at)

    def _round(self, constant: Tensor) -> Tensor:
        """Return a constant in half precision; tied ones stay tied."""
        key = (constant.data_ptr(), tuple(constant.shape), constant.stride())
        if key not in self._rounded:
            held = constant.clamp(-self.most / 2, self.most / 2)
            too_large = (constant.abs() > self.most) & constant.isfinite()
            self._rounded[key] = torch.where(too_large, held, constant).to(self.half)
        return self._rounded[key]


class _Modes:
    """Chooses the precision of each call by its operator, and by what is known of its arguments and readers."""

    def __init__(self, values: _Values) -> None:
        self._values = values

    def choose(self, node: fx.Node) -> _Mode:
        """Return the precision in which a call runs."""
        floats, name = self._values.floats(node), autocast.name(node)
        if self._is_single(node):
            return _Mode.SINGLE
        if name in autocast.HALF and not (name in autocast.OUTER and fake(argument(node, 0)).shape[-1] == 1):
            return _Mode.HALF
        if not floats:
            return self._mode_without_floats(node)
        if all(n in self._values.wide for n in floats):
            return _Mode.SINGLE
        if name not in autocast.JOINS and any(
            n in self._values.wide and not self._values.is_rounded_first(n) for n in floats
        ):
            return _Mode.JOINED
        return _Mode.HALF

    def _mode_without_floats(self, node: fx.Node) -> _Mode:
        """Return the mode of a call without floats: half precision for look-ups, float32 for arithmetic on integers."""
        if is_call(node, _TO):
            return _Mode.HALF if fake(argument(node, 0)).dtype == torch.bool else _Mode.SINGLE
        counted = is_tagged_pointwise(node) and any(is_integer(fake(n)) for n in node.all_input_nodes)
        looked_up = self._values.constants(node) and not counted
        return _Mode.HALF if looked_up or autocast.name(node) in autocast.FILLS else _Mode.SINGLE

    def _is_single(self, node: fx.Node) -> bool:
        """Return whether a call runs in float32, whatever the precision of its arguments."""
        return (
            autocast.is_single(node)
            or self._holds_other_floats(node)
            or self._is_cast_by_author(node)
            or (is_tagged_pointwise(node) and all_users(node, lambda user: autocast.name(user) in autocast.ROUNDINGS))
            or (is_square(node) and all_users(node, lambda user: autocast.name(user) in autocast.SUMS))
            or self._is_copy_on_the_way(node)
            or self._makes_huge(node)
        )

    def _holds_other_floats(self, node: fx.Node) -> bool:
        """Return whether arguments or results are float64 or complex tensors; a single number does not count."""
        dtypes = set(self._values.before[node])
        dtypes.update(dtype for n in node.all_input_nodes for dtype in self._values.before[n] if rank_of(n))
        return any(dtype.is_complex or dtype == torch.float64 for dtype in dtypes)

    def _is_cast_by_author(self, node: fx.Node) -> bool:
        if node.kwargs.get("dtype") != torch.float32 or autocast.name(node) in autocast.FILLS:
            return False
        return not is_call(node, _TO) or fake(argument(node, 0)).dtype != torch.bool  # half holds bools exactly

    def _is_copy_on_the_way(self, node: fx.Node) -> bool:
        """Return whether it copies, views or bounds a value still in float32, and all its readers take float32."""
        floats = self._values.floats(node)
        if not floats or any(fake(n).dtype != torch.float32 for n in floats):
            return False
        return (is_copy(node) or autocast.name(node) in autocast.BOUNDS) and all_users(node, self._takes_single)

    def _takes_single(self, user: fx.Node) -> bool:
        if is_copy(user):
            return all_users(user, self._takes_single)
        return user.op == "output" or autocast.is_single(user) or is_call(user, _TO)

    def _makes_huge(self, node: fx.Node) -> bool:
        """Return whether it computes with numbers that half precision cannot hold, other than to hide or to bound."""
        name = autocast.name(node)
        if name in autocast.PRODUCTS and any(self._values.is_huge(n) for n in self._values.constants(node)):
            return True
        numbers = [part for part in tree_leaves((node.args, node.kwargs)) if isinstance(part, float)]
        return name not in autocast.FILLS | autocast.BOUNDS and any(map(self._values.is_huge, numbers))


class _Caster:
    """Casts the calls of one graph in order."""

    def __init__(self, module: fx.GraphModule, dtype: torch.dtype) -> None:
        self._values = _Values(module, dtype)
        self._modes = _Modes(self._values)
        self._kernels = Kernels(dtype)
        self.rewriter = self._values.rewriter

    def visit(self, node: fx.Node) -> None:
        """Cast the arguments of a call to what it needs."""
        if not isinstance(node.target, OpOverload):
            self._visit_part(node)
        elif not self._values.floats(node) and torch.float32 not in self._values.before[node]:
            return
        elif is_call(node, _TO) and torch.float32 not in self._values.before[node]:
            self._visit_cast(node)
        else:
            self._rewrite(node, self._modes.choose(node))

    def _visit_part(self, node: fx.Node) -> None:
        """Update one result of a call of several."""
        whole, index = argument(node, 0), argument(node, 1)
        node.meta["val"] = whole.meta["val"][index]
        if whole in self._values.wide and fake(node).dtype == torch.float32:
            self._values.wide.add(node)

    def _visit_cast(self, node: fx.Node) -> None:
        """Drop a cast of the model from float32 to another dtype, where the value exists in that dtype."""
        source, dtype = argument(node, 0), fake(node).dtype
        made = source if fake(source).dtype == dtype else self._values.casts.get((source, dtype), node)
        if is_widened(source, dtype):
            made = argument(source, 0)
        if fake(made).stride() != fake(node).stride():
            return
        if made is not node:
            node.replace_all_uses_with(made)
            self.rewriter.graph.erase_node(node)
        else:
            self._values.casts[source, dtype] = node

    def _rewrite(self, node: fx.Node, mode: _Mode) -> None:
        """Give a call the arguments of the first attempt that succeeds."""
        before = node.args, node.kwargs
        for attempt in self._attempts(node, mode):
            node.args, node.kwargs = attempt.args, attempt.kwargs
            value = self._infer(node)
            if value is not None and self._is_as_wanted(node, value, attempt.result):
                node.meta["val"] = value
                if mode is _Mode.SINGLE and autocast.name(node) not in autocast.BOUNDED:
                    self._values.remember(node)
                return
            node.args, node.kwargs = before
        where = node.meta.get("source") or "the model"
        raise UnsupportedModelError(
            f"{node.target} in {where} supports neither {self._values.half} nor float32: compile it without --precision"
        )

    def _infer(self, node: fx.Node) -> Any:
        """Return the results of a call; None where it refuses its arguments."""
        try:
            value = self.rewriter.infer(node)
        except _REFUSALS:
            return None
        return value if self._kernels.serve(node) else None

    def _is_as_wanted(self, node: fx.Node, value: Any, result: torch.dtype) -> bool:
        """Return whether results keep their shapes, and have the dtypes that the attempt expects."""
        if shapes_of(value) != shapes_of(node.meta["val"]):
            return False
        pairs = list(zip(dtypes_of(value), self._values.before[node], strict=True))
        floats = [now for now, before in pairs if before == torch.float32]
        return (
            all(now == before for now, before in pairs if before != torch.float32)
            and floats[:1] in ([], [result])
            # Norms return their statistics in float32.
            and {*floats} <= {result, torch.float32}
        )

    def _attempts(self, node: fx.Node, mode: _Mode) -> Iterator[_Attempt]:
        """Yield the attempts to make, in order."""
        in_half = partial(self._values.in_dtype, dtype=self._values.half, at=node)
        if mode is _Mode.HALF:
            yield self._attempt(node, self._values.half, lambda n: n if self._stays(node, n) else in_half(n))
            yield self._attempt(node, self._values.half, in_half)
        elif mode is _Mode.JOINED and is_tagged_pointwise(node):  # the kernel itself casts
            yield self._attempt(node, torch.float32, lambda n: in_half(n) if self._values.is_rounded_first(n) else n)
        elif self._accumulates(node):
            yield _Attempt(node.args, {**node.kwargs, "dtype": torch.float32}, torch.float32)
        yield self._attempt(node, torch.float32, lambda n: self._values.in_dtype(n, torch.float32, node))

    def _accumulates(self, node: fx.Node) -> bool:
        """Return whether a call itself sums half precision into float32."""
        halves = any(fake(n).dtype == self._values.half for n in self._values.floats(node))
        return halves and autocast.name(node) in autocast.ACCUMULATIONS

    def _attempt(self, node: fx.Node, dtype: torch.dtype, take: Callable[[fx.Node], fx.Node]) -> _Attempt:
        """Return the call with float32 arguments mapped by ``take``, and numbers clamped to the range of ``dtype``."""
        most = self._values.most if autocast.name(node) in autocast.BOUNDS else self._values.most / 2

        def argument(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [argument(item) for item in value]
            if isinstance(value, fx.Node):
                return take(value) if self._values.before.get(value) == (torch.float32,) else value
            if dtype == self._values.half and isinstance(value, float) and self._values.is_huge(value):
                return max(-most, min(value, most))
            return dtype if value is torch.float32 else value

        args = tuple(argument(value) for value in node.args)
        return _Attempt(args, {name: argument(value) for name, value in node.kwargs.items()}, dtype)

    def _stays(self, node: fx.Node, argument: fx.Node) -> bool:
        """Return whether a constant stays in float32 beside half precision: batch norms' parameters, single numbers."""
        if argument.op != "get_attr":
            return False
        is_number = is_tagged_pointwise(node) and not rank_of(argument) and not self._values.is_huge(argument)
        return is_number or autocast.name(node) in autocast.BATCH_NORMS

    def restore_outputs(self) -> None:
        """Cast outputs back to the model's dtypes."""
        output = self.rewriter.graph.output_node()
        output.args = fx.map_arg(output.args, lambda n: self._values.in_dtype(n, self._values.before[n][0], output))
