# ruff: noqa: T201 (a program that prints)
"""Fuzz the CPU target with small models of the kinds that ONNX Runtime's optimiser rewrites.

A plan must compute what a session without optimisers computes, on several inputs. Findings are "wrong", "refused" or a
crash; each is kept as a folder of the model and its inputs and outputs.

    python -m fuzz.rewrites --seconds 60 --seed 0                     # plans
    python -m fuzz.rewrites --seconds 60 --seed 0 --session           # ONNX Runtime's optimised session instead
    python -m fuzz.rewrites --count 2000 --list-rewrites              # the optimisers that change a model
    python -m fuzz.rewrites --shrink fuzz-found                       # the smallest model of each kind of finding
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import numpy as np
import onnx.printer
import onnxruntime
from onnx import ModelProto, helper

import nimblec
import nimblec.cpu.compile
import nimblert
from fuzz import campaign, sessions, shrinking
from fuzz.campaign import Fuzzer
from fuzz.patterns import draw_model
from fuzz.sessions import Inputs
from nimblert.errors import NimbleError

_ATTEMPTS = 50
"""Draws of a model until one is valid."""

Case = tuple[Inputs, list[np.ndarray]]
"""Inputs, and what the unoptimised session computes from them."""


class FindingError(AssertionError):
    """A plan or session that is not allowed. The text begins with its class."""


def draw_case(seed: int, number: int, note: Callable[[bytes], object] = lambda _file: None) -> ModelProto:
    """Return the model of a case: the first valid draw.

    ``note`` gets each model that may crash ONNX Runtime before it is run.
    """
    for attempt in range(_ATTEMPTS):
        try:
            model = draw_model(Random(f"{seed} {number} {attempt}"))  # noqa: S311 - reproducible
        except ValueError:
            continue
        note(model.SerializeToString())
        cases = reference(model)
        if cases:
            _declare_outputs(model, cases[0][1])
            return model
    raise ValueError(f"case {number} of seed {seed}: no draw is valid")


def _declare_outputs(model: ModelProto, values: Sequence[np.ndarray]) -> None:
    for output, value in zip(model.graph.output, values, strict=True):
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        output.CopyFrom(helper.make_tensor_value_info(output.name, kind, value.shape))


def reference(model: ModelProto) -> list[Case]:
    """Return the input sets that an unoptimised session runs, with its outputs; none if it refuses the model."""
    try:
        session = sessions.open_session(model, optimised=False)
    except Exception:  # noqa: BLE001 - those of ONNX Runtime have no other common class
        return []
    runs = [(inputs, sessions.run(session, inputs)) for inputs in sessions.draw_inputs(model)]
    return [(inputs, outputs) for inputs, outputs in runs if outputs is not None]


def judge_plan(file: bytes) -> str:
    """Compile the model and run the plan. Raises FindingError."""
    model = ModelProto.FromString(file)
    cases = reference(model)
    if not cases:
        return "invalid"
    integers = {name: array for name, array in cases[0][0].items() if array.dtype.kind in "iu"}
    try:
        plan = nimblec.compile(
            model, target="cpu", plan_cache=None, timing_cache=_timing_cache(), streams="1", examples=integers
        )
    except NimbleError as exc:
        raise FindingError(f"refused: {type(exc).__name__}: {exc}") from exc
    with nimblert.load(plan, threads=1) as executable:
        names = [output.name for output in model.graph.output]

        def run(inputs: Inputs) -> list[np.ndarray]:
            used = {tensor.name: inputs[tensor.name] for tensor in executable.inputs}
            found = executable.run(used)
            return [np.asarray(found[name]) for name in names]

        return _compared(model, cases, run)


def judge_session(file: bytes, without: Sequence[str] = ()) -> str:
    """Run the model in ONNX Runtime's optimised session, without some of the optimisers. Raises FindingError."""
    model = ModelProto.FromString(file)
    cases = reference(model)
    if not cases:
        return "invalid"
    try:
        session = sessions.open_session(model, optimised=True, without=without)
    except Exception as exc:
        raise FindingError(f"refused: {exc}") from exc

    def run(inputs: Inputs) -> list[np.ndarray]:
        outputs = sessions.run(session, inputs)
        if outputs is None:
            raise FindingError("refused: the optimised session fails on inputs that the unoptimised one runs")
        return outputs

    return _compared(model, cases, run)


def _compared(model: ModelProto, cases: list[Case], run: Callable[[Inputs], list[np.ndarray]]) -> str:
    """Compare each case with what ``run`` computes."""
    for number, (inputs, right) in enumerate(cases):
        try:
            outputs = run(inputs)
        except NimbleError as exc:
            raise FindingError(f"refused: inputs {number}: {type(exc).__name__}: {exc}") from exc
        if not sessions.is_rounding(model, inputs, right, outputs):
            apart = ", ".join(f"{sessions.difference(a, b):.2g}" for a, b in zip(right, outputs, strict=True))
            raise FindingError(f"wrong: inputs {number}: outputs differ by {apart}; patterns {model.graph.name}")
    return "right"


@cache
def _timing_cache() -> str:
    return tempfile.mkdtemp(prefix="nimblec-fuzz-") + "/times"


def kind_of(file: bytes, judge: Callable[[bytes], str] = judge_plan) -> str:
    """Return the kind of a finding: its class and the optimisers at fault; "" for no finding.

    "A or B" is right without either, "A and B" only without both.
    """
    if excuse(file, False):
        return ""
    try:
        return str(sessions.apart(_kind, file, judge, _class_of))
    except sessions.CrashError:
        return _kind(file, judge, _class_apart)


def _kind(file: bytes, judge: Callable[[bytes], str], class_of: Callable[..., str]) -> str:
    found = class_of(judge, file)
    if found in {"right", "invalid"}:
        return ""
    if judge is not judge_session and class_of(judge_session, file) == "right":
        return f"{found} in nimblec alone"
    try:
        names = sessions.apart(sessions.modified, ModelProto.FromString(file))
    except (sessions.CrashError, RuntimeError):
        names = sessions.all_names()

    def is_right(without: Iterable[str]) -> bool:
        off = [f"{name}{level}" for name in without for level in ("", "L1", "L2")]
        return class_of(judge_session, file, off) == "right"

    guilty = [name for name in _families(names) if is_right([name])]
    if guilty:
        return f"{found} by {' or '.join(guilty)}"
    off = _families(sessions.all_names())
    if not is_right(off):
        return f"{found} whatever is left out"
    for name in list(off):
        fewer = [other for other in off if other != name]
        off = fewer if is_right(fewer) else off
    return f"{found} by {' and '.join(off)}"


def _families(names: Iterable[str]) -> list[str]:
    """Return the names without their level: an optimiser of two levels does the same at both."""
    return sorted({re.sub(r"L[12]$", "", name) for name in names})


def _class_of(judge: Callable[..., str], *arguments: object) -> str:
    """Return the class of a finding, or "right"."""
    try:
        return judge(*arguments)
    except FindingError as exc:
        return str(exc).partition(":")[0]


def _class_apart(judge: Callable[..., str], *arguments: object) -> str:
    """Return the class of a finding that may end its process."""
    try:
        return str(sessions.apart(_class_of, judge, *arguments))
    except sessions.CrashError:
        return "crashed"


def keep(file: bytes, path: Path) -> None:
    """Write a finding as a folder: model.onnx, and for each input set its arrays."""
    path.mkdir(exist_ok=True)
    (path / "model.onnx").write_bytes(file)
    if not file:
        return
    model = ModelProto.FromString(file)
    for number, inputs in enumerate(sessions.draw_inputs(model)):
        for name, array in inputs.items():
            np.save(path / f"{number}-{name}.npy", array)


def excuse(file: bytes, hung: bool) -> str:
    """Return the outcome of a case that ended its process, where the unoptimised session does so too."""
    if hung:
        return ""
    try:
        sessions.apart(reference, ModelProto.FromString(file))
    except sessions.CrashError:
        return "unoptimised crashes"
    return ""


class _NoCheck:
    """In place of the compiler's last check, a process of its own: the plan is run here."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def differing_output(self, *_: object, **__: object) -> None:
        return None


def start() -> None:
    """Prepare a child."""
    assert hasattr(nimblec.cpu.compile, "LeanProcess")
    nimblec.cpu.compile.LeanProcess = _NoCheck
    np.seterr(all="ignore")


def list_rewrites(seed: int, count: int) -> int:
    """Print each optimiser that changes a model of the first ``count``: how often, and the first such case."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for number in range(count):
        try:
            (patterns, names) = sessions.apart(_rewrites_of, seed, number)
        except (sessions.CrashError, RuntimeError):
            continue
        counts.update(names)
        for name in names:
            first.setdefault(name, f"{number}\t{patterns}")
    print(f"# ONNX Runtime {onnxruntime.__version__}, seed {seed}, {count} models")
    print("# optimiser\tmodels that it changes\tfirst\tpatterns of the first")
    for name in sorted(counts):
        print(f"{name}\t{counts[name]}\t{first[name]}")
    return 0


def _rewrites_of(seed: int, number: int) -> tuple[str, set[str]]:
    model = draw_case(seed, number)
    return model.graph.name, sessions.modified(model)


def shrink_all(folder: Path, judge: Callable[[bytes], str]) -> int:
    """Write the smallest model of each kind of finding in a folder to its folder "smallest", and print them.

    Findings of one kind whose smallest models have the same operators count as one.
    """
    smallest: dict[str, ModelProto] = {}
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("*/model.onnx")):
        kind = kind_of(path.read_bytes(), judge)
        counts[kind or "not found again"] += 1
        if not kind or counts[kind] > shrinking.MOST_OF_A_KIND:
            continue
        small = shrinking.shrink(ModelProto.FromString(path.read_bytes()), partial(_is_alike, kind, judge))
        kind = f"{kind_of(small.SerializeToString(), judge)}: {' '.join(node.op_type for node in small.graph.node)}"
        if kind not in smallest or len(small.SerializeToString()) < len(smallest[kind].SerializeToString()):
            smallest[kind] = small
    for number, (kind, model) in enumerate(sorted(smallest.items())):
        print(f"\n{kind}\n{onnx.printer.to_text(model)}")
        keep(model.SerializeToString(), _made(folder / "smallest" / str(number)))
    for kind, count in counts.most_common():
        print(f"{count:6} {kind}")
    return 0


def _is_alike(kind: str, judge: Callable[[bytes], str], file: bytes) -> bool:
    """Return whether a model's finding has the class of ``kind`` and an optimiser in common with it."""
    (a, _, names), (b, _, others) = kind.partition(" by "), kind_of(file, judge).partition(" by ")
    return a == b and (names == others or bool({*names.split(" or ")} & {*others.split(" or ")}))


def _made(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    return path


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.rewrites", add_help=False)
    parser.add_argument("--session", action="store_true")
    parser.add_argument("--list-rewrites", action="store_true")
    parser.add_argument("--shrink", type=Path)
    options, others = parser.parse_known_args(arguments)
    judge = judge_session if options.session else judge_plan
    if options.shrink:
        start()
        return shrink_all(options.shrink, judge)
    if options.list_rewrites:
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--count", type=int, default=2000)
        options = parser.parse_args(arguments)
        return list_rewrites(options.seed, options.count)

    def build(seed: int, number: int, note: Callable[[bytes], object]) -> bytes:
        return bytes(draw_case(seed, number, note).SerializeToString())

    return campaign.main(
        Fuzzer(name="rewrites", build=build, judge=judge, start=start, excuse=excuse, keep=keep), others
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
