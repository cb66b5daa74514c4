"""The request to the capture process, as files that it reads."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from nimblec.base.options import DEFAULT_LEVEL, InputSpec, NamedInput, Options
from nimblec.base.source import Source

_SPECS = {"inputs": InputSpec, "named_inputs": NamedInput}
_ARRAYS = ("constants", "examples")
_PATHS = ("timing_cache", "plan_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """A compilation for the CUDA target.

    ``source`` holds no object of the requesting process, and ``output`` is the plan file to write. ``sys_path`` comes
    first in the module search path of the capture process.
    """

    source: Source
    options: Options
    output: Path
    sys_path: tuple[str, ...]

    @property
    def level(self) -> int:
        """The level of optimisation."""
        return DEFAULT_LEVEL if self.options.level is None else self.options.level

    def save(self, folder: Path) -> None:
        """Write the request into ``folder``, for `load`."""
        arrays = {f"{field}:{name}": array for field in _ARRAYS for name, array in getattr(self.options, field)}
        np.savez(folder / "arrays.npz", **arrays)
        without = replace(self, options=replace(self.options, constants=(), examples=()))
        (folder / "request.json").write_text(json.dumps(asdict(without), default=str))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the request that `save` wrote."""
        found = json.loads((folder / "request.json").read_text(), object_hook=_with_tuples)
        options = found["options"]
        options |= {field: tuple(spec(**each) for each in options[field]) for field, spec in _SPECS.items()}
        options |= {field: options[field] and Path(options[field]) for field in _PATHS}
        with np.load(folder / "arrays.npz") as arrays:
            for key in arrays:
                field, _, name = key.partition(":")
                options[field] += ((name, arrays[key]),)
        return cls(
            source=_source(found["source"]),
            options=Options(**options),
            output=Path(found["output"]),
            sys_path=found["sys_path"],
        )


def _with_tuples(found: dict[str, Any]) -> dict[str, Any]:
    return {key: _tuple(value) for key, value in found.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _source(found: dict[str, Any]) -> Source:
    return Source(**{**found, "entries": tuple((name, _source(entry)) for name, entry in found["entries"])})
