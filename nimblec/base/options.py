"""Options of `compile`, and one reader of them for the command line and for Python."""

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from nimblec.base.errors import ArgumentError, CompileError
from nimblert.plan import ITEM_NBYTES, Profile
from nimblert.plan.records import DEFAULT_LIMITS, is_integer

TargetChoice: TypeAlias = Literal[
    "auto", "cuda", "cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"
]
"""What to compile for: a machine's GPU or CPU, or a GPU that need not be there."""

Precision: TypeAlias = Literal["keep", "fp32", "tf32", "fp16", "bf16", "fp8"]

Level: TypeAlias = Literal[0, 1, 2]

DEFAULT_LEVEL = 1
"""The default level of optimisation of a CUDA plan."""

DEFAULT_TRIP_LIMIT = 1 << 20
"""The most trips of a loop whose number of trips the model leaves open."""

MOST_PROFILES = 128
"""Each is a program of the plan, which is compiled and timed separately."""

OWN_TIMING_CACHE = "~/.cache/nimblec/timings.json"
OWN_PLAN_CACHE = "~/.cache/nimblec/plans"
"""The default caches, in the user's cache folder."""


class SizeRange(tuple[int, ...]):
    """The sizes of programs for a range such as "1..16": both ends, and the powers of two between them."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The static shape of a model input, and its dtype (a plan's dtype name) where it is given."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedInput:
    """A model input of which some dimensions get names, for `Options.dims` and `Options.sizes`; others have sizes."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``inputs`` fix the shapes of inputs by name; ``examples`` are arrays for inputs by name.

    ``constants`` are arrays in the place of inputs of an ONNX file, which the plan then lacks.
    ``named_inputs`` give names to dimensions of an ONNX file that have none. ``dims`` are sizes of a model's named
    dimensions, wherever ``inputs`` leave them dynamic; ``sizes`` those of dimensions that have several, ascending: the
    plan has a program for each of their `profiles`.
    ``pad_masks`` are inputs that are 0 where others are padded, and so mask what is there.
    An integer input with an example is drawn from the example's range in later golden checks.
    ``bounds`` are the largest shapes of outputs whose sizes depend on values (not of PyTorch models on CUDA).
    ``streams``: "auto", "1", "max" or a number of streams; ``memory_limit``: bytes the arena may
    have. ``timing_cache`` is the file that keeps measured times, ``plan_cache`` the folder that keeps
    the plans of model files (None: nowhere); by default both are in the user's cache folder, if that is known.
    ``reproducible``: no measured time decides or is stored, and ``timing_cache`` is not used.
    ``level``: 0 keeps the framework's own kernels, 1 fuses, 2 also chooses kernels by timing them
    (CUDA target; None is `DEFAULT_LEVEL` there). ``precision``: "keep" leaves torch's settings, "fp32"
    and "tf32" say how float32 convolutions and matrix products are computed, "fp16" and "bf16" compute
    a float32 model in half precision, and "fp8" as "fp16", with products of e4m3 (CUDA target). ``max_error`` is the
    largest difference to accept, relative to an output's largest magnitude, from level 0 at the model's own precision,
    or on the CPU target from ONNX Runtime without its optimiser. ``approximate`` rounds activations to 8 bits beside
    quantised weights (CPU target).
    ``trip_limit``: the most trips of a loop whose number of trips the model leaves open. ``print_passes`` notes
    each rewrite that runs (CPU target: ONNX Runtime's optimiser, as one). ``refittable`` keeps weights
    replaceable that are folded or repacked.
    """

    target: TargetChoice = "auto"
    inputs: tuple[InputSpec, ...] = ()
    named_inputs: tuple[NamedInput, ...] = ()
    dims: tuple[tuple[str, int], ...] = ()
    sizes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    pad_masks: tuple[str, ...] = ()
    constants: tuple[tuple[str, np.ndarray], ...] = field(default=(), compare=False)
    examples: tuple[tuple[str, np.ndarray], ...] = field(default=(), compare=False)
    level: int | None = None
    precision: Precision = "keep"
    max_error: float | None = None
    approximate: bool = False
    trip_limit: int = DEFAULT_TRIP_LIMIT
    bounds: tuple[tuple[str, tuple[int, ...]], ...] = ()
    print_passes: bool = False
    refittable: bool = False
    streams: str = "auto"
    memory_limit: int | None = None
    reproducible: bool = False
    timing_cache: Path | None = field(default_factory=lambda: _read_cache(OWN_TIMING_CACHE))
    plan_cache: Path | None = field(default_factory=lambda: _read_cache(OWN_PLAN_CACHE))

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """Every combination of ``sizes``; the empty profile where no dimension has several."""
        names = [name for name, _ in self.sizes]
        return tuple(tuple(zip(names, chosen, strict=True)) for chosen in product(*(sizes for _, sizes in self.sizes)))

    @property
    def is_for_absent(self) -> bool:
        """Whether the plan is for a GPU of a named architecture, which need not be here."""
        return self.target.startswith("sm_")

    def at(self, profile: Profile) -> "Options":
        """Return the options of one of the `profiles`."""
        return replace(self, dims=(*self.dims, *profile), sizes=(), pad_masks=())

    def filling(self, names: Collection[str]) -> "Options":
        """Return the options with every size of the ranges of these dimensions."""
        filled = {name: tuple(range(sizes[0], sizes[-1] + 1)) for name, sizes in self.sizes if name in names}
        return replace(self, sizes=tuple((name, filled.get(name, sizes)) for name, sizes in self.sizes))


def read_options(**given: Any) -> Options:
    """Parse options as `nimblec.compile` and the command line take them.

    Raises ArgumentError, which names the option, what was found and what was expected.
    """
    for name in given:
        if name not in _READERS:
            meant = get_close_matches(name, _READERS, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"expected one of {', '.join(_READERS)}"
            raise ArgumentError(f"there is no option {name!r}: {hint}")
    read = {}
    for name, value in given.items():
        try:
            read[name] = _READERS[name](value)
        except ArgumentError as exc:
            raise ArgumentError(f"{name}: {exc}") from exc
    inputs = read.pop("inputs", ())
    static = tuple(spec for spec in inputs if isinstance(spec, InputSpec))
    named = tuple(spec for spec in inputs if isinstance(spec, NamedInput))
    if twice := next((spec.name for spec in static if spec.name in {other.name for other in named}), None):
        raise ArgumentError(f"--input {twice}: given twice; give it once")
    dims = read.pop("dims", ())
    several = tuple((name, sizes) for name, sizes in dims if len(sizes) > 1)
    if twice := next((name for name, _ in several if [other for other, _ in dims].count(name) > 1), None):
        raise ArgumentError(f"--dim {twice}: given twice; give all of its sizes at once, such as {twice}=1,2,4")
    if (count := math.prod(len(sizes) for _, sizes in several)) > MOST_PROFILES:
        counts = " x ".join(str(len(sizes)) for _, sizes in several)
        raise ArgumentError(f"dims: {counts} sizes make {count} programs, expected at most {MOST_PROFILES}")
    if (masks := read.get("pad_masks")) and not several:
        raise ArgumentError(f"--pad-mask {masks[0]}: needs a dimension of several sizes, such as --dim NAME=1,8")
    if read.get("reproducible") and read.get("level") == 2:
        raise ArgumentError("--reproducible: -O2 chooses kernels by timing them: give -O1 or -O0")
    fixed = tuple((name, sizes[0]) for name, sizes in dims if len(sizes) == 1)
    return Options(**read, inputs=static, named_inputs=named, dims=fixed, sizes=several)


def read_spec(text: str) -> InputSpec | NamedInput:
    """Parse ``NAME:SHAPE[:DTYPE]`` from the right, since a name may contain colons.

    SHAPE is sizes with an "x" between them, or sizes and names with commas; one alone has its comma behind it.
    """
    *fields, last = text.split(":")
    dtype, shape = (last, fields.pop()) if len(fields) > 1 and last in ITEM_NBYTES else (None, last)
    if not any(fields) or not (_BY_X.fullmatch(shape) or _BY_COMMA.fullmatch(shape)):
        raise ArgumentError(
            f"{shortened(text)} is not NAME:SHAPE[:DTYPE], such as image:1x3x224x224, ids:1x16:int64 or, with a named "
            f"dimension, image:batch,3,224,224 (dtypes: {', '.join(ITEM_NBYTES)})"
        )
    return _spec(":".join(fields), _shape(shape), dtype)


def read_size(value: int | str) -> int:
    """Return the size of a dimension, which a plan holds in 63 bits."""
    if not (is_integer(value) or (isinstance(value, str) and _SIZE.fullmatch(value))):
        raise ArgumentError(f"{shortened(value)}, expected a size such as 4")
    size = int(value)
    if not 0 <= size < 2**63:
        raise ArgumentError(f"{size}, expected a size from 0 to {2**63 - 1}")
    return size


def read_sizes(value: Any) -> tuple[int, ...]:
    """Return the sizes of a dimension, ascending, from 4, "1,2,8", (1, 2, 8) or "1..16" (powers of two, both ends)."""
    if isinstance(value, str):
        if not _SIZES.fullmatch(value):
            raise ArgumentError(f"{shortened(value)}, expected a size such as 4, several (1,2,8) or a range (1..16)")
        first, dots, last = value.partition("..")
        if dots:
            return _powers(read_size(first), read_size(last))
        sizes = tuple(map(read_size, value.split(",")))
    elif isinstance(value, SizeRange):
        return value
    elif isinstance(value, Iterable):
        sizes = tuple(map(read_size, value))
    else:
        sizes = (read_size(value),)
    if not sizes or len(set(sizes)) < len(sizes):
        raise ArgumentError(f"{shortened(value)}, expected one size or several, each once")
    return tuple(sorted(sizes))


def _powers(first: int, last: int) -> SizeRange:
    if not 0 < first < last:
        raise ArgumentError(f"{first}..{last}, expected a range such as 1..16")
    between = (1 << bits for bits in range(first.bit_length(), last.bit_length()))
    return SizeRange((first, *(power for power in between if power < last), last))


def read_shape(value: Any) -> tuple[int, ...]:
    """Return a shape without names: (64, 3), 64 or "64x3"."""
    shape = _shape((value,) if is_integer(value) else value)
    if named := [size for size in shape if isinstance(size, str)]:
        raise ArgumentError(f"{shortened(named[0])}, expected a size")
    return tuple(size for size in shape if isinstance(size, int))


def read_streams(value: int | str) -> str:
    """Return the policy, as `Options.streams` takes it."""
    text = str(value) if is_integer(value) else value
    if not isinstance(text, str) or not _STREAMS.fullmatch(text):
        raise ArgumentError(f"{shortened(value)}, expected auto, max, or a number of streams from 1")
    return text


def read_nbytes(value: int | str) -> int:
    """Return the number of bytes; units are decimal (kB, MB, GB) or binary (KiB, MiB, GiB)."""
    text = str(value).strip() if isinstance(value, str) or is_integer(value) else ""
    found = _NBYTES.fullmatch(text)
    if found is None:
        raise ArgumentError(f"{shortened(value)}, expected a number of bytes such as 1000000, 64MiB or 1.5GB")
    return int(Decimal(found["number"]) * _UNITS[found["unit"].lower()])


def read_numbers(value: Any) -> np.ndarray:
    """Parse a number or several: 16000, "0.5", "true", [1, 2], "1,2"; "1," is a vector of one number."""
    try:
        array = np.asarray(_numbers(value) if isinstance(value, str) else value)
    except ValueError:
        array = None
    if array is None or array.dtype.name not in ITEM_NBYTES:
        raise ArgumentError(f"{shortened(value)}, expected a number such as 16000, true or 0.5, or several (1,2)")
    return array


def _numbers(text: str) -> bool | float | list[bool | float]:
    numbers = [_number(part) for part in text.removesuffix(",").split(",")]
    return numbers if "," in text else numbers[0]


def _number(text: str) -> bool | float:
    if text in {"true", "false"}:
        return text == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    number = float(text)
    if math.isinf(number) and "inf" not in text.lower():
        raise ValueError(f"{text} is out of range")
    return number


_INTEGER = re.compile(r"[-+]?[0-9]+")
_SIZE = re.compile(r"[0-9]{1,19}")
_SIZES = re.compile(rf"{_SIZE.pattern}((,{_SIZE.pattern})*|\.\.{_SIZE.pattern})")
_DIMENSION = re.compile(r"[^\W\d][^,:]*")
_BY_X = re.compile(rf"{_SIZE.pattern}(x{_SIZE.pattern})*|scalar|")
_BY_COMMA = re.compile(rf"(({_SIZE.pattern}|{_DIMENSION.pattern}),)+({_SIZE.pattern}|{_DIMENSION.pattern})?")
_STREAMS = re.compile(r"auto|max|[1-9][0-9]{0,8}")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NBYTES = re.compile(r"(?P<number>[0-9]{1,18}(\.[0-9]{1,18})?)\s*(?P<unit>|b|[kmg]i?b)", re.IGNORECASE)


def _shape(shape: Any) -> tuple[int | str, ...]:
    """Return a shape as the command line writes it, or a sequence of sizes and names."""
    if isinstance(shape, str):
        separator = "," if "," in shape else "x"
        return () if shape in {"", "scalar"} else tuple(map(_dimension, shape.removesuffix(",").split(separator)))
    if not isinstance(shape, Iterable):
        raise ArgumentError(f"{shortened(shape)}, expected a shape such as (1, 3, 224, 224)")
    return tuple(map(_dimension, shape))


def _dimension(value: Any) -> int | str:
    """Return the size of a dimension, or its name."""
    if isinstance(value, str) and _DIMENSION.fullmatch(value):
        return value
    try:
        return read_size(value)
    except ArgumentError as exc:
        raise ArgumentError(f"{exc}, or a name") from exc


def _spec(name: str, shape: tuple[int | str, ...], dtype: str | None = None) -> InputSpec | NamedInput:
    sizes = tuple(size for size in shape if isinstance(size, int))
    if len(sizes) == len(shape):
        return InputSpec(name=name, shape=sizes, dtype=dtype)
    return NamedInput(name=name, shape=shape, dtype=dtype)


def _read_inputs(value: Any) -> tuple[InputSpec | NamedInput, ...]:
    """Read inputs from a mapping of names to shapes, or a sequence of `InputSpec` and NAME:SHAPE[:DTYPE]."""
    if isinstance(value, Mapping):
        return tuple(_spec_of(name, shape) for name, shape in _named(value))
    if isinstance(value, Iterable) and not isinstance(value, str):
        items = tuple(value)
        if all(isinstance(item, InputSpec | NamedInput | str) for item in items):
            return tuple(read_spec(item) if isinstance(item, str) else item for item in items)
    raise ArgumentError(f'{shortened(value)}, expected {{"image": (1, 3, 224, 224)}} or ["image:1x3x224x224"]')


def _spec_of(name: str, shape: Any) -> InputSpec | NamedInput:
    return read_spec(f"{name}:{shape}") if isinstance(shape, str) else _spec(name, _shape(shape))


def _read_dims(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, read_sizes(sizes)) for name, sizes in _named(value))


def _read_names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{shortened(value)}, expected names of inputs")
    return names


def _read_bounds(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, read_shape(shape)) for name, shape in _named(value))


def _read_constants(value: Any) -> tuple[tuple[str, np.ndarray], ...]:
    return tuple((name, _constant(name, constant)) for name, constant in _named(value))


def _constant(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray) or hasattr(value, "detach"):
        array = _array(name, value)
    else:
        try:
            array = read_numbers(value)
        except ArgumentError as exc:
            raise ArgumentError(f"{name!r}: {exc}") from exc
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array  # .npz files have no bfloat16


def _read_examples(value: Any) -> tuple[tuple[str, np.ndarray], ...]:
    return tuple((name, _array(name, example)) for name, example in _named(value))


def sample_range(name: str, example: np.ndarray) -> tuple[int, int] | None:
    """Return the range of an integer input's example, which bounds integers drawn later.

    A plan holds it as int64: integers that are larger are not drawn. Raises CompileError where all are.
    """
    if example.dtype.kind not in "iu" or not example.size:
        return None
    low, high = int(example.min()), int(example.max())
    largest = 2**63 - 1
    if low > largest:
        raise CompileError(f"input {name!r}: its example holds only integers above 2**63 - 1: give a smaller one too")
    return low, min(high, largest)


def _array(name: str, example: Any) -> np.ndarray:
    if isinstance(example, np.ma.MaskedArray):
        raise ArgumentError(f"{name!r} is a masked array, and plans have no masks: give its .filled()")
    array = example if isinstance(example, np.ndarray) else None
    if array is None and hasattr(example, "detach"):
        array = np.asarray(example.detach().cpu())
    if array is None or array.dtype.name not in ITEM_NBYTES:
        found = f"an array of {array.dtype}" if array is not None else shortened(example)
        raise ArgumentError(f"{name!r} is {found}, expected an array of one of {', '.join(ITEM_NBYTES)}")
    return array


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a mapping, or pairs as the command line gives them, where a name may stand twice."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ArgumentError(f"{shortened(value)}, expected a dict by name")
    for name, item in pairs:
        if not isinstance(name, str):
            raise ArgumentError(f"{shortened(name)} is not a name: expected a string")
        yield name, item


def _one_of(*choices: object) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return value
        raise ArgumentError(f"{shortened(value)}, expected {' or '.join(map(repr, choices))}")

    return read


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _read_error(value: Any) -> float:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ArgumentError(f"{shortened(value)}, expected a number from 0, such as 1e-3")
    return float(value)


def _read_trips(value: Any) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 < value <= DEFAULT_LIMITS.trips:
        raise ArgumentError(f"{shortened(value)}, expected a number from 1 to {DEFAULT_LIMITS.trips}")
    return int(value)


def _read_path(value: Any) -> Path:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"{shortened(value)}, expected a path")
    try:
        return Path(text).expanduser()
    except RuntimeError as exc:
        raise ArgumentError(f"{text!r}: the home folder is not known: set HOME, or give another path") from exc


def _read_cache(value: Any) -> Path | None:
    """Return the path of a cache; None for a default one where the home folder is not known."""
    try:
        return _read_path(value)
    except ArgumentError:
        if value in (OWN_TIMING_CACHE, OWN_PLAN_CACHE):
            return None
        raise


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "target": _one_of(*get_args(TargetChoice)),
    "inputs": _read_inputs,
    "dims": _read_dims,
    "pad_masks": _read_names,
    "constants": _read_constants,
    "examples": _read_examples,
    "level": _one_of(None, *get_args(Level)),
    "precision": _one_of(*get_args(Precision)),
    "max_error": _or_none(_read_error),
    "approximate": _one_of(False, True),
    "trip_limit": _read_trips,
    "bounds": _read_bounds,
    "print_passes": _one_of(False, True),
    "refittable": _one_of(False, True),
    "streams": read_streams,
    "memory_limit": _or_none(read_nbytes),
    "reproducible": _one_of(False, True),
    "timing_cache": _read_cache,
    "plan_cache": _or_none(_read_cache),
}
