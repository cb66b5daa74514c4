"""Tables that torch makes anew for every export, which takes longer than to export most of the models of the tests."""

import copy
import sys
import typing
from functools import cache
from typing import Any

import torch
from torch._export import utils


def make_once() -> None:
    """Have torch, as far as it is imported, make each of them once."""
    _find_operators_once()
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration:
        _translate_operators_once(registration.ONNXRegistry)


@cache
def _find_operators_once() -> None:
    """Have torch.export load the composite operators again only where there are others than before.

    Nor does it then make the annotations of every kernel that it replaces, which Python 3.14 does not either.
    """
    load = utils._materialize_cpp_cia_ops
    loaded: list[str] = []

    def load_others() -> None:
        found = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if found != loaded:
            load()
            loaded[:] = found

    utils._materialize_cpp_cia_ops = load_others
    torch._ops.Callable = typing.Callable  # type: ignore[attr-defined]  # that of typing is cached


@cache
def _translate_operators_once(registry: Any) -> None:
    """Have torch.onnx.export's ``ONNXRegistry`` hand out copies of one table for each opset.

    Translations of ours are registered in the copy.
    """
    make = cache(registry.from_torchlib)

    def from_torchlib(*args: Any, **kwargs: Any) -> Any:
        made = copy.copy(make(*args, **kwargs))
        made.functions = {name: [*functions] for name, functions in made.functions.items()}
        return made

    registry.from_torchlib = staticmethod(from_torchlib)
