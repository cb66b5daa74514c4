"""A model in a step, with other tensors in place of its parameters and buffers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nimblec.base.errors import UnsupportedModelError
from nimblec.pytorch.state import call_with


def result_with(model: nn.Module, given: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Any:
    """Return the result of a model that has the tensors ``given`` by name.

    Raises UnsupportedModelError where the model assigns one of them, which would change nothing that lasts.
    """
    memory = {name: tensor.untyped_storage()._cdata for name, tensor in given.items()}
    after = dict(given)
    result = call_with(model, after, tuple(inputs))
    for name, tensor in given.items():
        if after[name] is not tensor or tensor.untyped_storage()._cdata != memory[name]:
            raise UnsupportedModelError(
                f"training_step: forward assigns {name!r}, and a plan keeps what is written in place: "
                f"write into it, {name.rpartition('.')[2]}.copy_(...)"
            )
    return result
