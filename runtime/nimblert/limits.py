"""How much a plan may ask of this machine: ceilings that `verify` holds a plan against."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most of each thing that a plan may have; nothing is allocated before it is held against them.

    ``memory_nbytes`` is the arena, the state, inputs and outputs together: what a load allocates
    beside the weights, which are in the file. ``tensor_nbytes`` is one input, output, parameter or
    weight, its elements side by side. ``model_nbytes`` is one ONNX model of the CPU target.
    ``accesses`` counts the byte ranges that all launches of a program read and write, relocations
    included; ``streams``, ``events`` and ``commands`` are those of one program. ``event_clocks`` is
    events times streams, which bounds what the proof of order may hold in memory.
    """

    memory_nbytes: int = 64 << 30
    tensor_nbytes: int = 16 << 30
    model_nbytes: int = 4 << 20
    modules: int = 1 << 17
    kernels: int = 1 << 17
    programs: int = 1 << 10
    streams: int = 1 << 10
    events: int = 1 << 20
    event_clocks: int = 1 << 26
    commands: int = 1 << 20
    accesses: int = 1 << 23


DEFAULT_LIMITS = Limits()
"""What a plan may have unless the caller says otherwise: more than any model that nimblec is tested with needs."""
