"""How much a plan may ask of this machine: ceilings that `verify` holds a plan against."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most of each thing that a plan may have; nothing is allocated before it is held against them.

    - ``memory_nbytes``: the arena, the state, inputs and outputs of a program together, which is what
      a load allocates beside the weights. ``tensor_nbytes``: one input, output, parameter or weight,
      its elements side by side. ``model_nbytes``: one ONNX model of the CPU target.
    - ``modules``, ``kernels``, ``programs``; and of one program ``streams``, ``events``, ``commands``.
    - What the proof of order may take for one program: ``pieces``, the byte ranges that commands
      access, cut where others begin or end; ``clocks``, waits times streams.
    """

    memory_nbytes: int = 64 << 30
    tensor_nbytes: int = 16 << 30
    model_nbytes: int = 64 << 20
    modules: int = 1 << 17
    kernels: int = 1 << 17
    programs: int = 1 << 10
    streams: int = 1 << 10
    events: int = 1 << 20
    commands: int = 1 << 20
    pieces: int = 1 << 24
    clocks: int = 1 << 25


DEFAULT_LIMITS = Limits()
"""What a plan may have unless the caller says otherwise: far more than any model that nimblec is tested with."""
