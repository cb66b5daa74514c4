"""Limits on what a plan may ask of this machine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most of each thing that a plan may have; nothing is allocated before it is held against them.

    - ``memory_nbytes``: the arena, the state, inputs and outputs of all programs together, which is what
      an executable allocates beside the weights. ``tensor_nbytes``: one input, output, parameter or weight,
      its elements side by side.
    - Of the ONNX models of a CPU plan: ``model_nbytes``, one of them; ``model_fields``, the protobuf
      fields of all of them together, each of which is a Python object while it is checked.
    - ``modules``, ``kernels``, ``programs``; and of one program ``streams``, ``events``, ``commands``.
    - ``refits``, the groups of weights that are replaced together.
    - What the proof of order may take for one program: ``pieces``, the byte ranges that commands
      access, cut where others begin or end; ``clocks``, waits times streams.
    """

    memory_nbytes: int = 64 << 30
    tensor_nbytes: int = 16 << 30
    model_nbytes: int = 64 << 20
    model_fields: int = 1 << 22
    modules: int = 1 << 17
    kernels: int = 1 << 17
    programs: int = 1 << 10
    refits: int = 1 << 16
    streams: int = 1 << 10
    events: int = 1 << 20
    commands: int = 1 << 20
    pieces: int = 1 << 24
    clocks: int = 1 << 25


DEFAULT_LIMITS = Limits()
"""What a plan may have unless the caller says otherwise: far more than any model that nimblec is tested with."""
