"""Limits on what a plan may ask of this machine."""

from dataclasses import asdict, dataclass

import numpy as np

from nimblert.errors import InputError


def is_integer(value: object) -> bool:
    """Whether it is a number without a fraction, numpy's too; True is not one."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper limits for a plan, checked before anything is allocated: whole numbers, else InputError.

    - ``memory_nbytes``: arena, state, inputs and outputs of all programs together, which is what an executable
      allocates besides the weights. ``tensor_nbytes``: one contiguous input, output, parameter or weight.
    - ONNX models of a CPU plan: ``model_nbytes`` of each; ``model_fields``, the protobuf fields of all together, each
      of which is a Python object while it is checked.
    - Numbers of ``modules``, ``kernels`` and ``programs``; of ``streams``, ``events`` and ``commands`` of one program;
      of ``refits``, the groups of weights that are replaced together; of ONNX Runtime's ``sessions`` for the programs
      that are loaded, which is known only when they are opened.
    - The cost of proving that one program is ordered: ``pieces``, the byte ranges that commands access, cut where
      others begin or end; ``clocks``, waits times streams.
    """

    memory_nbytes: int = 64 << 30
    tensor_nbytes: int = 16 << 30
    model_nbytes: int = 64 << 20
    model_fields: int = 1 << 22
    modules: int = 1 << 17
    kernels: int = 1 << 17
    programs: int = 1 << 10
    refits: int = 1 << 16
    sessions: int = 1 << 13
    streams: int = 1 << 10
    events: int = 1 << 20
    commands: int = 1 << 20
    pieces: int = 1 << 24
    clocks: int = 1 << 25

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if not is_integer(limit) or limit < 0:
                raise InputError(f"limits: {name} is {limit!r}, expected a whole number of at least 0")


DEFAULT_LIMITS = Limits()
"""The default limits: far above every model that nimblec is tested with."""
