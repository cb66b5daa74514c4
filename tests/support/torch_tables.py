"""A cache of tables that torch rebuilds for every export, which takes longer than exporting most test models."""

import copy
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch._export import utils
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch.export import decomp_utils, exported_program


def make_once() -> None:
    """Make the imported parts of torch build each table once."""
    _find_operators_once()
    _override_operators_once()
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration:
        _translate_operators_once(registration.ONNXRegistry)


@cache
def _find_operators_once() -> None:
    """Make torch.export look for new composite operators once for each table, not once for each namespace.

    It also skips the annotations of the kernels that it replaces, as on Python 3.14.
    """
    load, collect = utils._materialize_cpp_cia_ops, utils._collect_all_valid_cia_ops
    loaded: list[str] = []
    is_collecting = False

    def load_others() -> None:
        if is_collecting:
            return
        found = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if found != loaded:
            load()
            loaded[:] = found

    def collect_all() -> Any:
        nonlocal is_collecting
        load_others()
        is_collecting = True
        try:
            return collect()
        finally:
            is_collecting = False

    utils._materialize_cpp_cia_ops = load_others
    users: tuple[Any, ...] = (utils, exported_program, decomp_utils)
    for module in users:
        module._collect_all_valid_cia_ops = collect_all
    torch._ops.Callable = typing.Callable  # type: ignore[attr-defined]  # typing's is cached


@cache
def _override_operators_once() -> None:
    """Make runs of decompositions reuse the Python kernels of composite operators that an earlier one has made.

    They are made again for an operator that has other kernels before, or is to be decomposed otherwise.
    """
    override = exported_program._override_composite_implicit_decomp
    made: dict[Any, _Overridden] = {}

    @contextmanager
    def override_again(decompositions: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
        before = {op: dict(op.py_kernels) for op in decompositions}
        has_rule = {op for op in decompositions if op in fake_impls.op_implementations_dict}
        keys = {op: (op, _identity(how)) for op, how in decompositions.items()}
        known = {op: made[key] for op, key in keys.items() if key in made and made[key].before == before[op]}
        others = {op: how for op, how in decompositions.items() if op not in known}
        with override(others):
            for op in others.keys() - has_rule:
                rule = fake_impls.op_implementations_dict[op]
                made[keys[op]] = _Overridden(before=before[op], after=dict(op.py_kernels), rule=rule)
            for op, overridden in known.items():
                _set_kernels(op, overridden.after)
                if op not in has_rule:
                    fake_impls.register_op_impl(op)(overridden.rule)
            try:
                yield
            finally:
                for op in known:
                    _set_kernels(op, before[op])
                    fake_impls._deregister_op_impl(op)

    exported_program._override_composite_implicit_decomp = override_again  # type: ignore[assignment]


class _Overridden(NamedTuple):
    """The kernels of an operator before and after it was overridden, and its rule for fake tensors."""

    before: dict[Any, Any]
    after: dict[Any, Any]
    rule: Callable[..., Any]


def _identity(how: Callable[..., Any]) -> object:
    """Return what two equal ways to decompose an operator have in common: torch makes some anew for each table."""
    if isinstance(how, partial) and not how.args and how.keywords.keys() == {"kernel"}:
        return how.func.__code__, how.keywords["kernel"]
    return how


def _set_kernels(op: OpOverload, kernels: Mapping[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


@cache
def _translate_operators_once(registry: Any) -> None:
    """Make torch.onnx.export's ``ONNXRegistry`` return copies of one table for each opset.

    Our translations are registered in the copy.
    """
    make = cache(registry.from_torchlib)

    def from_torchlib(*args: Any, **kwargs: Any) -> Any:
        made = copy.copy(make(*args, **kwargs))
        made.functions = {name: [*functions] for name, functions in made.functions.items()}
        return made

    registry.from_torchlib = staticmethod(from_torchlib)
