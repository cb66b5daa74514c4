"""The request to the capture process, and its JSON form."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nimblec.base.options import InputSpec, NamedInput, Precision
from nimblec.base.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """A compilation for the CUDA target. The other fields are those of `nimblec.base.options.Options`.

    ``source`` holds no object of the requesting process, ``constants`` and ``examples`` are .npz files of the arrays,
    and ``output`` the plan file to write. ``sys_path`` comes first in the module search path of the capture process.
    """

    source: Source
    inputs: tuple[InputSpec, ...]
    named_inputs: tuple[NamedInput, ...]
    dims: tuple[tuple[str, int], ...]
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    pad_masks: tuple[str, ...]
    constants: Path | None
    examples: Path | None
    output: Path
    level: int
    precision: Precision
    max_error: float | None
    print_passes: bool
    refittable: bool
    streams: str
    memory_limit: int | None
    reproducible: bool
    timing_cache: Path
    sys_path: tuple[str, ...]

    def to_json(self) -> str:
        """The request as JSON text for `from_json`."""
        return json.dumps(asdict(self), default=os.fspath)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The request that `to_json` wrote."""
        found = json.loads(text)
        return cls(
            source=_source(found["source"]),
            inputs=tuple(InputSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in found["inputs"]),
            named_inputs=tuple(NamedInput(**{**spec, "shape": tuple(spec["shape"])}) for spec in found["named_inputs"]),
            dims=tuple((name, size) for name, size in found["dims"]),
            sizes=tuple((name, tuple(sizes)) for name, sizes in found["sizes"]),
            pad_masks=tuple(found["pad_masks"]),
            constants=None if found["constants"] is None else Path(found["constants"]),
            examples=None if found["examples"] is None else Path(found["examples"]),
            output=Path(found["output"]),
            level=found["level"],
            precision=found["precision"],
            max_error=found["max_error"],
            print_passes=found["print_passes"],
            refittable=found["refittable"],
            streams=found["streams"],
            memory_limit=found["memory_limit"],
            reproducible=found["reproducible"],
            timing_cache=Path(found["timing_cache"]),
            sys_path=tuple(found["sys_path"]),
        )


def _source(found: dict[str, Any]) -> Source:
    entries = tuple((name, _source(entry)) for name, entry in found["entries"])
    labels = tuple((symbol, name) for symbol, name in found["labels"])
    shared = tuple((name, number) for name, number in found["shared"])
    return Source(kind=found["kind"], model=found["model"], entries=entries, labels=labels, shared=shared)
