"""The table of operators of torch.onnx.export, which it otherwise makes anew for every model, in about a second."""

import copy
from functools import cache
from typing import Any


def make_once(registry: Any) -> None:
    """Have its ``ONNXRegistry`` hand out copies of one table for each opset.

    Translations of ours are registered in the copy.
    """
    make = cache(registry.from_torchlib)

    def from_torchlib(*args: Any, **kwargs: Any) -> Any:
        made = copy.copy(make(*args, **kwargs))
        made.functions = {name: [*functions] for name, functions in made.functions.items()}
        return made

    registry.from_torchlib = staticmethod(from_torchlib)
