"""A model in a step, with other tensors in place of its parameters and buffers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nimblec.errors import UnsupportedModelError
from nimblec.frontend.pytorch.state import call_with, places


def result_with(model: nn.Module, given: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Any:
    """The result of a model that has the tensors ``given`` by name.

    Raises UnsupportedModelError where the model assigns one of them, which would change nothing that lasts.
    """
    tensors = dict(places(model))
    names = {id(tensors[name]): name for name in given}
    memory = {name: tensor.untyped_storage()._cdata for name, tensor in given.items()}

    def refuse_assigned(*_: object) -> None:
        held = dict(places(model))
        for place, before in tensors.items():
            name = names.get(id(before))
            if name is None:
                continue
            tensor = held.get(place)
            if tensor is not given[name] or tensor.untyped_storage()._cdata != memory[name]:
                raise UnsupportedModelError(
                    f"training_step: forward assigns {place!r}, and a plan keeps what is written in place: "
                    f"write into it, {place.rpartition('.')[2]}.copy_(...)"
                )

    with model.register_forward_hook(refuse_assigned):
        return call_with(model, given, tuple(inputs))
