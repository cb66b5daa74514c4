"""A .pt2 file: what torch would evaluate or unpickle is checked first, and what is damaged is one sentence."""

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine

from nimblec.base.errors import CompileError
from nimblec.pytorch.exported_program import load_exported
from nimblec.pytorch.size_expression import check_expression


class Model(torch.nn.Module):
    """Sizes that are products, quotients, remainders and maxima of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute."""
        n = x.shape[0]
        h = self.linear(x).relu()
        parts = h.reshape(-1).unflatten(0, (n * 2, -1)).sum(1)
        return {"parts": parts, "scaled": h * (n // 2 + n % 3), "padded": torch.nn.functional.pad(h, (0, 0, 0, n - 1))}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model with a dynamic batch, saved."""
    path = tmp_path_factory.mktemp("pt2") / "m.pt2"
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Model().eval(), (torch.randn(4, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    return path


Change = Callable[[bytes], bytes]


def changed(source: Path, target: Path, ending: str, change: Change, extra: dict[str, bytes] | None = None) -> Path:
    """Return a copy of an archive in which the member whose name ends with ``ending`` is another."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            content = old.read(entry.filename)
            new.writestr(entry, change(content) if ending and entry.filename.endswith(ending) else content)
        for name, content in (extra or {}).items():
            new.writestr(f"m/{name}", content)
    return target


def with_program(change: Callable[[Any], None]) -> Change:
    def apply(content: bytes) -> bytes:
        program = json.loads(content)
        change(program)
        return json.dumps(program).encode()

    return apply


def test_what_torch_saves_is_loaded(exported: Path) -> None:
    program = load_exported(exported)
    (x,), kwargs = program.example_inputs
    assert (x.shape, kwargs) == ((4, 4), {})
    assert program.module(check_guards=False)(torch.ones(6, 4))["padded"].shape == (11, 4)


class Payload:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self._trace),))


def pickled(trace: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Payload(trace), buffer)
    return buffer.getvalue()


def evil_expression(trace: Path) -> Change:
    return lambda content: re.sub(
        rb'"expr_str": ?"[^"]*"', f"\"expr_str\": \"__import__('os').mkdir('{trace}')\"".encode(), content
    )


def evil_call(trace: Path) -> Change:
    def change(program: Any) -> None:
        node = next(
            n for n in program["graph_module"]["graph"]["nodes"] if n["target"].startswith("torch.ops.aten.relu")
        )
        node["target"] = "torch.os.mkdir"
        node["inputs"] = [{"name": "", "arg": {"as_string": str(trace)}, "kind": 1}]

    return with_program(change)


def evil_weight(_: bytes) -> bytes:
    return json.dumps(
        {"config": {"linear.weight": {"path_name": "evil", "is_param": True, "use_pickle": True, "tensor_meta": None}}}
    ).encode()


def evil_constant(_: bytes) -> bytes:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    return json.dumps({"config": {"c": entry}}).encode()


HOSTILE: dict[str, tuple[str, Callable[[Path], Change], str]] = {
    "sample inputs": ("sample_inputs/model.pt", lambda trace: lambda _: pickled(trace), "pickle of more than tensors"),
    "expression": ("model.json", evil_expression, "expected an expression of integers and symbols"),
    "call": ("model.json", evil_call, "is not an allowed operator type"),
    "weight": ("model_weights_config.json", lambda _: evil_weight, "pickle of more than tensors"),
    "constant": ("model_constants_config.json", lambda _: evil_constant, "holds a pickled object"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_program_is_refused(nimblec: CommandLine, exported: Path, tmp_path: Path, kind: str) -> None:
    trace = tmp_path / "ran"
    ending, change, words = HOSTILE[kind]
    extra = {"data/weights/evil": pickled(trace), "data/constants/opaque_obj_0": pickle.dumps(Payload(trace))}
    path = changed(exported, tmp_path / "evil.pt2", ending, change(trace), extra)
    sentence = nimblec.refused("compile", path, "-o", tmp_path / "m.plan", "--target", "cpu", "-q")
    assert sentence.startswith(f"{path}: ")
    is_first = torch.__version__.startswith("2.11.")
    assert ("not written by torch.export.save of torch" if is_first and kind == "call" else words) in sentence
    assert not trace.exists()
    if kind != "call" and not (is_first and kind == "constant"):
        # The control: torch runs it, whatever it says of it afterwards.
        with suppress(Exception):
            torch.export.load(path)
        assert trace.exists()


def test_a_file_of_an_older_torch_is_not_unpickled(nimblec: CommandLine, tmp_path: Path) -> None:
    """The layout of torch 2.7 and before, which torch.export.load falls back to."""
    path = tmp_path / "old.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.1")
        for name in ("exported_program.json", "state_dict.pt", "constants.pt", "example_inputs.pt"):
            archive.writestr(f"serialized_{name}", pickled(tmp_path / "ran"))
    sentence = nimblec.refused("compile", path, "-o", tmp_path / "m.plan", "--target", "cpu", "-q")
    assert "damaged, or not written by torch.export.save of torch" in sentence
    assert "enforce fail" not in sentence
    assert not (tmp_path / "ran").exists()


class Colour(Enum):
    """An enum as a key of a dict."""

    RED = 1


def test_types_do_not_import_modules(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "imported_by_a_spec.py").write_text("raise SystemExit('ran')")
    key = {"__enum__": True, "fqn": "imported_by_a_spec:Colour", "name": "RED"}
    spec = [1, {"type": "builtins.dict", "context": json.dumps([key]), "children_spec": []}]

    def change(program: Any) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(spec)

    path = changed(exported, tmp_path / "evil.pt2", "model.json", with_program(change))
    with pytest.raises(CompileError, match="names a module to import"):
        load_exported(path)


def set_symbol(program: Any) -> None:
    program["range_constraints"]["u9999999999"] = {"min_val": 0, "max_val": 1}


@pytest.mark.parametrize(
    ("ending", "change", "extra"),
    [
        ("model.json", lambda content: content[: len(content) // 2], {}),
        ("model.json", lambda _: b"[" * 100_000, {}),
        ("model.json", lambda _: b"\xff", {}),
        ("model.json", lambda content: content.replace(b'"opset_version"', b'"other"'), {}),
        ("model.json", with_program(set_symbol), {}),
        ("weight_0", lambda _: b"", {}),
        ("weight_0", lambda content: content[:5], {}),
        ("archive_format", lambda _: b"zip", {}),
        ("", bytes, {"models/other.json": b"{}"}),
        ("", bytes, {"data/aotinductor/model/a.so": b"\x7fELF"}),
    ],
)
def test_a_damaged_file_is_one_sentence(
    nimblec: CommandLine, exported: Path, tmp_path: Path, ending: str, change: Change, extra: dict[str, bytes]
) -> None:
    path = changed(exported, tmp_path / "m.pt2", ending, change, extra)
    if ending == "weight_0" and not change(b"weight"):
        path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in nimblec.refused("compile", path, "-o", tmp_path / "m.plan", "--target", "cpu", "-q")


def test_a_file_of_something_else_is_one_sentence(nimblec: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_text("a text")
    sentence = nimblec.refused("compile", path, "-o", tmp_path / "m.plan", "--target", "cpu", "-q")
    assert sentence == (
        f"{path}: damaged, or not written by torch.export.save of torch {torch.__version__} "
        "(RuntimeError: PytorchStreamReader failed reading zip archive: not a ZIP archive)"
    )


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Add(Mul(Integer(2), Symbol('s77', positive=True, integer=True)), Integer(-1))",
        "FloorDiv(Symbol('s0', integer=True), Integer(2))",
        "Max(Integer(1), Mod(Symbol('s0', integer=True), Integer(7)))",
        "Pow(Symbol('s0', integer=True), Integer(2))",
        "Pow(Symbol('s0', integer=True), Rational(1, 2))",
        "Piecewise(ExprCondPair(Integer(1), Equality(Symbol('u0'), Integer(2))), ExprCondPair(Integer(0), true))",
        "Float('0.5', precision=53)",
        "2*s0 + 1",
        "-s0//2 % 3",
        "Max(1, s0)",
        "s0 >= 2",
        "-s0**2",
    ],
)
def test_sizes_as_torch_writes_them(text: str) -> None:
    check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "__import__('os').system('true')",
            "(lambda: 1)()",
            "s0.func",
            "Symbol('s0').func",
            "Symbol('__import__(1)')",
        ),
        *("Symbol('s0', integer=exec('1'))", "Symbol", "exec('1')", "[x for x in s0]", "f'{s0}'", "open('x')"),
        *("Integer('__import__')", "Max(*s0)", "9**9**9**9", "Pow(Pow(10, 60), 60)", "LShift(1, 10000000000)"),
        *("2**(60*60*60)", "1" * 30, "s0 if s0 else 1", "s0; s1", "s0[0]", "(" * 500 + "s0" + ")" * 500),
        *("", "s0\n+__import__('os')", 5, None),
    ],
)
def test_anything_but_arithmetic_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="expected an expression of integers and symbols"):
        check_expression(text)


def test_a_file_that_runs_as_code_is_told(nimblec: CommandLine, exported: Path, tmp_path: Path) -> None:
    done = nimblec("compile", exported, "-o", tmp_path / "m.plan", "--target", "cpu", "--input", "x:4x4")
    assert done.status == 0, done.err
    assert done.err == f"note: {exported} is code that runs with your rights: compile only what you trust\n"
    assert "is code that runs with your rights" in " ".join(nimblec("compile", "--help").out.split())
