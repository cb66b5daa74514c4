"""The command line around the compiler and the runtime: notations, help, refusals, what it hands on."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from command_line import CommandLine
from plans import cpu_plan, pointer

from nimblec.base.options import InputSpec, NamedInput, Options, read_spec
from nimblec.base.stages import Observer
from nimblec.cli import arguments
from nimblec.cli.interrupts import INTERRUPTED
from nimblec.plan import encoder
from nimblert.errors import InputError
from nimblert.plan import Region, Target, Tensor

# --- notations


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("image:1x3x224x224", InputSpec(name="image", shape=(1, 3, 224, 224))),
        ("ids:1x16:int64", InputSpec(name="ids", shape=(1, 16), dtype="int64")),
        ("x:7", InputSpec(name="x", shape=(7,))),
        ("x:", InputSpec(name="x", shape=())),
        ("x:scalar", InputSpec(name="x", shape=())),
        ("x::float32", InputSpec(name="x", shape=(), dtype="float32")),
        ("serving/x:0:1x4", InputSpec(name="serving/x:0", shape=(1, 4))),
        ("x:0:2x2:bool", InputSpec(name="x:0", shape=(2, 2), dtype="bool")),
        ("float32:3", InputSpec(name="float32", shape=(3,))),
        ("x:1,3", InputSpec(name="x", shape=(1, 3))),
        ("x:0:batch,3:int64", NamedInput(name="x:0", shape=("batch", 3), dtype="int64")),
        ("x:4,a b", NamedInput(name="x", shape=(4, "a b"))),
        ("x:length,", NamedInput(name="x", shape=("length",))),
    ],
)
def test_an_input_specification_is_read_from_the_right(text: str, spec: InputSpec | NamedInput) -> None:
    assert read_spec(text) == spec


@pytest.mark.parametrize(
    "text", ["image", ":1x3", "x:1x-3", "x:ax3", "x:1x3:float99", "x:ax3,4:float99", "", ":", "x:1x", "x:float32"]
)
def test_a_wrong_specification_is_refused_with_an_example(nimblec: CommandLine, text: str) -> None:
    sentence = nimblec.refused("compile", "m.onnx", "-o", "m.plan", "--input", text)
    assert repr(text) in sentence
    assert "image:1x3x224x224" in sentence


def test_file_names_are_safe_and_distinct() -> None:
    names = ["a/b:0", "a_b_0", "A_B_0", "", "..", "../../etc/passwd", "x" * 300, "é", "con\n"]
    files = arguments.file_names(names)
    assert list(files) == names
    assert len({file.lower() for file in files.values()}) == len(names)
    for file in files.values():
        assert Path(file).name == file
        assert not file.startswith(".")
        assert len(file) < 120
    assert (files["a/b:0"], files["a_b_0"]) == ("a_b_0.npy", "a_b_0_2.npy")


def test_bfloat16_survives_npy_files(tmp_path: Path) -> None:
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    (path,) = arguments.write_arrays(tmp_path / "new" / "dir", {"x": array})
    tensor = Tensor(name="x", dtype="bfloat16", shape=(2,), strides=(1,), pointer=pointer(Region.INPUT))
    restored = arguments.restore_dtype(arguments.read_array(path), tensor)
    assert restored.dtype == array.dtype
    assert np.array_equal(restored, array)


@pytest.mark.parametrize("content", [b"", b"text", b"\x93NUMPY\x01", b"\x93NUMPY\x01\x00\xff\xff{"])
def test_a_damaged_array_is_an_input_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.npy: not an \.npy file, or a damaged one"):
        arguments.read_array(path)


def npy(header: str) -> bytes:
    """Return a version 2.0 file of this header, and no data."""
    return b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header.encode()


@pytest.mark.parametrize("shape", ["(10**18,)", "(1000000000000000000,)", "(-4,)", f"({'9' * 30},)", "(" * 4000])
def test_a_header_that_says_something_impossible(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n"))
    with pytest.raises(InputError, match=r"x\.npy: not an \.npy file, or a damaged one"):
        arguments.read_array(path)


def test_a_pipe_is_no_array(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(InputError, match=r"x\.npy: is not a regular file, expected an \.npy file"):
        arguments.read_array(tmp_path / "x.npy")


def test_pickles_and_archives_are_no_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "z.npz", np.zeros(1))
    for name in ("o.npy", "z.npz"):
        with pytest.raises(InputError, match=r"numpy\.save"):
            arguments.read_array(tmp_path / name)


# --- help and usage

COMMANDS = ("compile", "build", "run", "bench", "inspect", "explain", "diff", "verify", "sign", "doctor")


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands(nimblec: CommandLine, args: tuple[str, ...]) -> None:
    out = nimblec.prints(*args)
    assert all(f"\n  {command} " in out for command in COMMANDS)
    statuses = (
        "0 on success; 1 where `diff` finds a difference, or `build` a plan that is out of date or over its budget; "
        f"2 on an error, which is one sentence on standard error; {INTERRUPTED} after Ctrl-C."
    )
    assert f"Exit status: {statuses}" in " ".join(out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(nimblec: CommandLine, command: str) -> None:
    out = nimblec.prints(command, "--help")
    assert f"\n    nimblec {command} " in out
    assert "--debug" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("compile", "m.onnx"), "-o"),
        (("compile",), "MODEL"),
        (("frob",), "frob"),
        (("run", "p.plan", "--frob"), "--frob"),
        (("run", "p.plan", "--repeat", "0"), "--repeat"),
        (("run", "p.plan", "--seed", "-1"), "--seed"),
        (("run", "p.plan", "--cpu-threads", "0,,1"), "neither a number of threads nor a list of processors"),
        (("run", "p.plan", "--input", "image"), "image=photo.npy"),
        (("compile", "m.onnx", "-o", "p", "--target", "tpu"), "tpu"),
        (("compile", "m.onnx", "-o", "p", "--dim", "batch"), "batch=4"),
        (("compile", "m.onnx", "-o", "p", "--dim", "batch=-1"), "expected a size such as 4"),
        (("compile", "m.onnx", "-o", "p", "--dim", "batch=1,,2"), "expected a size such as 4"),
        (("compile", "m.onnx", "-o", "p", "--dim", "batch=4..4"), "expected a range such as 1..16"),
        (("compile", "m.onnx", "-o", "p", "--dim", "batch=2,2"), "each once"),
        (("compile", "m.onnx", "-o", "p", "-v", "-q"), "--quiet"),
    ],
)
def test_usage_error_points_to_help(nimblec: CommandLine, args: tuple[str, ...], words: str) -> None:
    sentence = nimblec.refused(*args)
    assert words in sentence
    assert "--help" in sentence


def test_python_dash_m_is_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    monkeypatch.setattr(sys, "argv", ["nimblec", "--version"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("nimblec", run_name="__main__")
    assert not exit_info.value.code


# --- compile, with a stand-in for the compiler


class Compiler(ModuleType):
    """Stands in for nimblec.compiler: writes a plan of another model and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("nimblec.compiler")
        self.asked: list[tuple[object, Options]] = []

    @staticmethod
    def choose_target(choice: str) -> tuple[Target, str]:
        """Take the CPU, whatever is wanted."""
        return Target.CPU, f"asked for {choice}"

    def compile_model(
        self, model: str, *, options: Options, output: Path, weights: Path | None, observer: Observer
    ) -> SimpleNamespace:
        """Pretend two stages."""
        assert weights is None
        self.asked.append((model, options))
        observer("capture", None)
        observer("capture", 1.234)
        plan = cpu_plan()
        encoder.write(plan, output)
        return SimpleNamespace(plan=plan, stages=(("capture", 1.234), ("check", 0.0123)), notes=("mind [this]",))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setitem(sys.modules, "nimblec.compiler", made)
    monkeypatch.setattr("nimblec.compiler", made, raising=False)  # where it was imported before
    return made


def test_compile_hands_on_what_was_asked_and_reports(nimblec: CommandLine, compiler: Compiler, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(4))
    done = nimblec(
        "compile", "pkg.module:make", "-o", tmp_path / "m.plan", "--input", "x:1x4", "--input", "ids:4:int64",
        "--dim", "batch=4", "--dim", "a=b + 1=7", "--dim", "rows=3..20", "--dim", "columns=8,2",
        "--example", f"ids={tmp_path / 'ids.npy'}",
    )  # fmt: skip
    assert done.status == 0, done.err
    ((model, options),) = compiler.asked
    assert model == "pkg.module:make"
    assert options.target == "cpu"
    assert options.inputs == (InputSpec(name="x", shape=(1, 4)), InputSpec(name="ids", shape=(4,), dtype="int64"))
    assert options.dims == (("batch", 4), ("a=b + 1", 7))
    assert options.sizes == (("rows", (3, 4, 8, 16, 20)), ("columns", (2, 8)))
    ((name, array),) = options.examples
    assert (name, array.tolist()) == ("ids", [0, 1, 2, 3])
    assert done.err == "note: pkg.module:make is code that runs with your rights: compile only what you trust\n"
    assert done.out.splitlines()[:2] == ["target: cpu (asked for auto)", "note: mind [this]"]
    for words in ("kernels", "2 (2 launches)", "modules", "weights", "arena", "256 B", "file", "1.23 s", "12.3 ms"):
        assert words in done.out
    assert f"wrote {tmp_path / 'm.plan'}" in done.out.replace("\n", "")


def test_a_callable_is_imported_from_the_current_directory(
    nimblec: CommandLine, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    nimblec("compile", "m.onnx", "-o", "m.plan")
    assert str(tmp_path) not in sys.path
    nimblec("compile", "mine:model", "-o", "m.plan")
    assert sys.path[0] == str(tmp_path)
    assert [model for model, _ in compiler.asked] == ["m.onnx", "mine:model"]


def test_verbose_prints_stages_and_quiet_nothing(nimblec: CommandLine, compiler: Compiler, tmp_path: Path) -> None:
    del compiler
    verbose = nimblec("compile", "m.onnx", "-o", tmp_path / "m.plan", "-v")
    assert "capture: 1.23 s" in verbose.err.splitlines()
    quiet = nimblec("compile", "m.onnx", "-o", tmp_path / "m.plan", "-q")
    assert (quiet.status, quiet.out, quiet.err) == (0, "", "")


def test_debug_shows_the_traceback(nimblec: CommandLine, tmp_path: Path) -> None:
    traced = nimblec("compile", "none.onnx", "-o", tmp_path / "m.plan", "--debug")
    assert traced.status == 2
    assert "Traceback" in traced.err
    assert traced.err.splitlines()[-1].startswith("nimblec: none.onnx")


def test_a_missing_or_repeated_example_is_refused(nimblec: CommandLine, compiler: Compiler, tmp_path: Path) -> None:
    compile_ = ("compile", "m.onnx", "-o", tmp_path / "m.plan")
    assert "none.npy" in nimblec.refused(*compile_, "--example", f"x={tmp_path / 'none.npy'}")
    np.save(tmp_path / "x.npy", np.zeros(1))
    twice = ("--example", f"x={tmp_path / 'x.npy'}") * 2
    assert "'x' was given twice" in nimblec.refused(*compile_, *twice)
    assert compiler.asked == []
