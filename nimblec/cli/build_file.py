"""Build files: a TOML table for each plan, whose keys are the options of ``nimblec compile`` and a few of its own."""

import glob
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import click

from nimblec.base.errors import ArgumentError
from nimblec.base.options import Options, read_nbytes
from nimblec.base.source import Source
from nimblec.cli import arguments
from nimblec.cli.compile import compile_model, options_of
from nimblec.find_source import find_source
from nimblert.errors import InputError, NimbleError
from nimblert.plan.files import destination

_NO_OPTIONS = {"as_json", "verbose", "quiet", "compress_weights"}
_NO_KEYS = {*_NO_OPTIONS, "output", "weights"}
"""Parameters of ``nimblec compile`` that are no options of a compilation, or that name a second file to write."""

OPTIONS = {
    next((name[2:] for name in option.opts if name.startswith("--")), option.name): option
    for option in compile_model.params
    if isinstance(option, click.Option) and option.expose_value and option.name not in _NO_KEYS
}
"""The options of ``nimblec compile`` by key: ``level`` for -O, which has no long name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBuild:
    """A plan to build: ``compile_arguments`` are those of ``nimblec compile`` without -o and MODEL.

    ``sources`` are the files that a model made by code depends on. ``budgets`` are bytes and seconds by key.
    """

    name: str
    model: str
    output: Path
    compile_arguments: tuple[str, ...]
    source: Source
    options: Options
    sources: tuple[Path, ...]
    budgets: Mapping[str, float]


def read_build_file(file: Path) -> list[PlanBuild]:
    """Read a build file in the current folder, relative to which its paths are.

    Raises InputError, which names the file and the key, and OSError where it cannot be read.
    """
    # Bad TOML and text that is not UTF-8 both raise ValueError.
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise InputError(f"{file}: not a TOML file: {exc}") from exc
    _refuse_unknown(content, ["plans"], f"{file}: ")
    tables = content.get("plans")
    if not isinstance(tables, dict) or not tables:
        raise InputError(f"{file}: plans: expected a table for each plan, such as [plans.resnet]")
    builds: dict[Path, PlanBuild] = {}
    for name, table in tables.items():
        build = _read_plan(f"{file}: plans.{name}", name, table)
        other = builds.setdefault(destination(build.output), build)
        if other is not build:
            what = f"{build.output} is also the output of plans.{other.name}"
            raise InputError(f"{file}: plans.{name}.output: {what}: give each plan a file of its own")
    return list(builds.values())


def _read_plan(where: str, name: str, table: Any) -> PlanBuild:
    if not isinstance(table, dict):
        raise InputError(f"{where}: {shortened(table)}, expected a table: [plans.{name}]")
    _refuse_unknown(table, [*_OWN, *OPTIONS], f"{where}.")
    if "model" not in table:
        raise InputError(f"{where}.model: is missing: name a file or package.module:callable")
    own: dict[str, Any] = {"output": f"{name}.plan", "sources": ()}
    for key, read in _OWN.items():
        if key in table:
            own[key] = _read(where, key, read, table[key])
    given = [] if "reproducible" in table else ["--reproducible"]
    for key, option in OPTIONS.items():
        if key in table:
            given += _read(where, key, partial(_arguments, option), table[key])
    model, output = own.pop("model"), Path(own.pop("output"))
    source = _read(where, "model", lambda value: find_source(value, None, None, Path()), model)
    parameters = _parse([*given, "-o", str(output), "--", model])
    try:
        options = options_of(**{key: value for key, value in parameters.items() if key not in _NO_OPTIONS})
    except (click.UsageError, NimbleError, OSError) as exc:
        hint = " (the default here; say reproducible = false)" if "--reproducible" in str(exc) else ""
        raise InputError(f"{where}: {_sentence(exc)}{hint}") from exc
    return PlanBuild(
        name=name,
        model=model,
        output=output,
        compile_arguments=tuple(given),
        source=source,
        options=options,
        sources=own.pop("sources"),
        budgets=own,
    )


def _refuse_unknown(table: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in table:
        if key not in known:
            meant = get_close_matches(key, known, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"expected one of {', '.join(known)}"
            raise InputError(f"{where}{key}: there is no such key: {hint}")


def _read(where: str, key: str, read: Callable[[Any], Any], value: Any) -> Any:
    """Return what a reader makes of a value; its error gets the place of the value."""
    try:
        return read(value)
    except (click.UsageError, NimbleError) as exc:
        raise InputError(f"{where}.{key}: {_sentence(exc)}") from exc


def _sentence(exc: Exception) -> str:
    return exc.message.rstrip(".") if isinstance(exc, click.UsageError) else str(exc)


def _arguments(option: click.Option, value: Any) -> list[str]:
    """Return the arguments of ``nimblec compile`` for a value of a build file, each of which click has taken."""
    name = option.opts[-1]
    if option.is_flag:
        if not isinstance(value, bool):
            raise ArgumentError(f"{shortened(value)}, expected true or false")
        return [name] if value else []
    if option.multiple and isinstance(value, dict):
        separator = ":" if option.type is arguments.SPEC else "="
        texts = [f"{key}{separator}{_text(item, is_list=True)}" for key, item in value.items()]
        if option.type is arguments.NAMED_SIZES:
            texts = [text.removesuffix(",") for text in texts]
    else:
        texts = [_text(item) for item in (value if option.multiple and isinstance(value, list) else [value])]
    for text in texts:
        _parse([name, text, "-o", "plan", "--", "model"])
    return [part for text in texts for part in (name, text)]


def _text(value: Any, *, is_list: bool = False) -> str:
    """Return a value as the command line takes it; a list of one element ends with a comma."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if is_list and isinstance(value, list):
        return ",".join(map(_text, value)) + "," * (len(value) == 1)
    raise ArgumentError(f"{shortened(value)}, expected {'a value or a list of them' if is_list else 'one value'}")


def _parse(given: list[str]) -> dict[str, Any]:
    return compile_model.make_context("compile", list(given)).params


def _read_string(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ArgumentError(f"{shortened(value)}, expected a string")
    return value


def _read_sources(value: Any) -> tuple[Path, ...]:
    found: set[str] = set()
    for pattern in map(_read_string, value if isinstance(value, list) else [value]):
        files = [file for file in glob.glob(pattern, recursive=True) if Path(file).is_file()]  # noqa: PTH207 - any path
        if not files:
            raise ArgumentError(f"{pattern!r} matches no file")
        found.update(files)
    return tuple(map(Path, sorted(found)))


def _read_seconds(value: Any) -> float:
    """Return the seconds of a number of them, or of text such as 5ms."""
    text = f"{value}s" if type(value) in {int, float} else str(value)
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) *(s|ms|us)", text)
    if not found:
        raise ArgumentError(f"{shortened(value)}, expected seconds such as 0.005, 5ms or 1.5s")
    return float(found[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[found[2]]


_OWN: Mapping[str, Callable[[Any], Any]] = {
    "model": _read_string,
    "output": _read_string,
    "sources": _read_sources,
    "max-size": read_nbytes,
    "max-arena": read_nbytes,
    "max-latency": _read_seconds,
    "max-cold-start": _read_seconds,
}
"""Readers of the keys that no option of ``nimblec compile`` has."""
