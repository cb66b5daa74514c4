"""A cache of tables that torch rebuilds for every export, which takes longer than exporting most test models."""

import copy
import sys
import typing
from functools import cache
from typing import Any

import torch
from torch._export import utils


def make_once() -> None:
    """Make the imported parts of torch build each table once."""
    _find_operators_once()
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration:
        _translate_operators_once(registration.ONNXRegistry)


@cache
def _find_operators_once() -> None:
    """Make torch.export reload the composite operators only if there are new ones.

    It also skips the annotations of the kernels that it replaces, as on Python 3.14.
    """
    load = utils._materialize_cpp_cia_ops
    loaded: list[str] = []

    def load_others() -> None:
        found = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if found != loaded:
            load()
            loaded[:] = found

    utils._materialize_cpp_cia_ops = load_others
    torch._ops.Callable = typing.Callable  # type: ignore[attr-defined]  # typing's is cached


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
