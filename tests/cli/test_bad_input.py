"""What the command line makes of bad input: one sentence, exit status 2, nothing written or lost.

Each kind is here or, where it needs nothing but a file, in test_cli_plans.py.
"""

import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import OLD_PLAN, CommandLine
from cpu_plans import floats, write_model
from onnx import TensorProto, helper
from plans import H200, cuda_plan
from subprocesses import ROOT, SOURCES

from nimblec.plan import encoder
from nimblert.check.verify import read_plan
from nimblert.cuda import driver
from nimblert.plan import Device
from nimblert.plan.files import scratch_folder

node = helper.make_node
DIGITS = ROOT / "samples" / "digits.onnx"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return an older plan in the place of the new one."""
    path = tmp_path / "out" / "model.plan"
    path.parent.mkdir()
    path.write_bytes(OLD_PLAN)
    return path


def assert_untouched(output: Path) -> None:
    assert output.read_bytes() == OLD_PLAN
    assert [path.name for path in output.parent.iterdir()] == [output.name]


# --- models


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    """Return a model of a dynamic batch and length."""
    return write_model(
        tmp_path / "m.onnx",
        [node("Add", ["x", "z"], ["y"])],
        [floats("x", "batch", "length"), floats("z", "batch", "length")],
        [floats("y", "batch", "length")],
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["'x'", "'z'", "'batch' (axis 0)", "'length' (axis 1)", "--dim batch=1", "--input x:1x<length>"]),
        (["--dim", "batch=2"], ["'length' (axis 1): give --dim length=<length> or --input x:2x<length>"]),
        (["--dim", "rows=2"], ["--dim rows: no input has a dimension of that name", "'batch', 'length'"]),
        (["--dim", "batch=2", "--dim", "batch=3"], ["--dim batch: given twice"]),
        (["--input", "x:2x3", "--input", "z:2x4"], ["--input z: dimension 'length' is 4, --input x makes it 3"]),
        (["--input", "q:2"], ["--input q: the model has no such input; its inputs are 'x', 'z'"]),
        (["--input", "x:2x3", "--input", "x:2x3"], ["--input x: given twice"]),
        (["--input", "x:2x3x4"], ["--input x: 3 dimensions, the model's input has 2 (?x?)"]),
        (["--input", "x:2x3:int64"], ["--input x: dtype int64, the model's input has float32"]),
    ],
)
def test_shapes_that_are_missing_or_contradict_name_the_flag(
    nimblec: CommandLine, dynamic: Path, output: Path, options: list[str], words: list[str]
) -> None:
    sentence = nimblec.refused("compile", dynamic, "-o", output, "--target", "cpu", "-q", *options)
    assert [word for word in words if word not in sentence] == []
    assert_untouched(output)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("foo", np.zeros((2, 3), np.float32), "the model has no such input; its inputs are 'x', 'z'"),
        ("x", np.zeros((2, 3), np.int64), "an array of int64 2x3, expected float32 ?x?"),
        ("x", np.zeros(3, np.float32), "an array of float32 3, expected float32 ?x?"),
    ],
)
def test_an_example_that_does_not_fit_is_named_as_one(
    nimblec: CommandLine, dynamic: Path, tmp_path: Path, output: Path, name: str, array: np.ndarray, words: str
) -> None:
    np.save(tmp_path / "a.npy", array)
    options = ("--target", "cpu", "-q", "--example", f"{name}={tmp_path / 'a.npy'}")
    assert nimblec.refused("compile", dynamic, "-o", output, *options) == f"--example {name}: {words}"
    assert_untouched(output)


def test_compile_takes_sizes_of_example(nimblec: CommandLine, dynamic: Path, tmp_path: Path, output: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3), np.float32))
    options = ("--target", "cpu", "-q", "--example", f"x={tmp_path / 'a.npy'}")
    assert nimblec("compile", dynamic, "-o", output, *options).status == 0
    assert [tensor.shape for tensor in read_plan(output).programs[0].inputs] == [(2, 3), (2, 3)]


def doubling_functions(path: Path, levels: int) -> Path:
    """Return a model of functions each of which calls the one before it twice: 2 ** levels nodes."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    functions = []
    for level in range(levels):
        inner, domain = ("Relu", "") if level == 0 else (f"f{level - 1}", "f")
        body = [node(inner, [a], [b], domain=domain) for a, b in (("x", "h"), ("h", "y"))]
        functions.append(helper.make_function("f", f"f{level}", ["x"], ["y"], body, opsets))
    write_model(path, [node(f"f{levels - 1}", ["x"], ["y"], domain="f")], [floats("x", 2)], [floats("y", 2)])
    model = onnx.load(path)
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid("f", 1))
    onnx.save(model, path)
    return path


def test_compile_counts_functions_first(nimblec: CommandLine, tmp_path: Path, output: Path) -> None:
    compile_ = ("compile", tmp_path / "m.onnx", "-o", output, "--target", "cpu", "-q")
    doubling_functions(tmp_path / "m.onnx", 60)
    assert "expands to more than 1,000,000 nodes once the functions that it calls" in nimblec.refused(*compile_)
    model = onnx.load(tmp_path / "m.onnx")
    model.functions[0].node[0].op_type, model.functions[0].node[0].domain = "f1", "f"
    onnx.save(model, tmp_path / "m.onnx")
    assert "'f.f1' calls itself, which ONNX does not allow" in nimblec.refused(*compile_)
    assert_untouched(output)
    doubling_functions(tmp_path / "m.onnx", 5)
    assert nimblec(*compile_).status == 0


def test_compile_tells_runtime_refusal(nimblec: CommandLine, tmp_path: Path, output: Path) -> None:
    bfloat16 = [(name, TensorProto.BFLOAT16, (2, 2)) for name in "xy"]
    write_model(tmp_path / "m.onnx", [node("MatMul", ["x", "x"], ["y"], name="mm")], bfloat16[:1], bfloat16[1:])
    sentence = nimblec.refused("compile", tmp_path / "m.onnx", "-o", output, "--target", "cpu", "-q")
    assert "has no CPU kernel for MatMul(13) node with name 'mm': its CPU kernels take float32" in sentence
    within = [
        node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16),
        node("MatMul", ["b", "b"], ["bb"], name="mm"),
        node("Cast", ["bb"], ["y"], to=TensorProto.FLOAT),
    ]
    write_model(tmp_path / "m.onnx", within, [floats("x", 2, 2)], [floats("y", 2, 2)])
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "m.onnx")), tmp_path / "m.onnx")
    assert sentence == nimblec.refused("compile", tmp_path / "m.onnx", "-o", output, "--target", "cpu", "-q")
    write_model(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], [floats("x", 2)], [floats("y", 2)])
    model = onnx.load(tmp_path / "m.onnx")
    model.opset_import[0].version = 99
    onnx.save(model, tmp_path / "m.onnx")
    sentence = nimblec.refused("compile", tmp_path / "m.onnx", "-o", output, "--target", "cpu", "-q")
    assert re.search("opset 99", sentence, re.IGNORECASE)
    assert not re.search(r"ONNXRuntimeError|onnxruntime_src|::", sentence)
    assert_untouched(output)


@pytest.mark.parametrize("name", ["mine.py:net", "./mine.py:net"])
def test_a_callable_named_by_its_file(nimblec: CommandLine, output: Path, name: str) -> None:
    sentence = nimblec.refused("compile", name, "-o", output, "--target", "cpu", "-q")
    assert sentence == f"{name}: a module is given by its import name: use mine:net"


HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("option", "value"),
    [("--input", f"x:{HUGE}"), ("--dim", f"n={HUGE}"), ("--memory-limit", HUGE), ("--streams", HUGE)],
)
def test_a_number_of_5000_digits(nimblec: CommandLine, output: Path, option: str, value: str) -> None:
    sentence = nimblec.refused("compile", DIGITS, "-o", output, "--target", "cpu", "-q", option, value)
    assert f"Invalid value for '{option}'" in sentence
    assert len(sentence) < 500
    assert_untouched(output)


@pytest.mark.parametrize("options", [["-O1"], ["-O2"], *(["--precision", p] for p in ("fp16", "bf16", "tf32"))])
def test_compile_refuses_cuda_options_on_cpu(nimblec: CommandLine, output: Path, options: list[str]) -> None:
    sentence = nimblec.refused("compile", DIGITS, "-o", output, "--target", "cpu", "-q", *options)
    assert sentence.startswith(f"{' '.join(options)}: only CUDA plans have ")
    assert_untouched(output)


def test_what_a_cpu_plan_does_anyway_may_be_asked_for(nimblec: CommandLine, output: Path) -> None:
    options = ("-O0", "--precision", "fp32", "--max-error", "0")
    assert nimblec("compile", DIGITS, "-o", output, "--target", "cpu", "-q", *options).status == 0


def test_missing_or_short_external_data(nimblec: CommandLine, tmp_path: Path, output: Path) -> None:
    model = onnx.load(DIGITS)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    data = tmp_path / "m.data"
    data.write_bytes(data.read_bytes()[:-1])
    compile_ = ("compile", path, "-o", output, "--target", "cpu", "-q")
    assert "was cut short" in nimblec.refused(*compile_)
    data.unlink()
    assert f"{data}: missing" in nimblec.refused(*compile_)
    assert_untouched(output)


def test_a_failure_on_random_inputs_points_to_examples(nimblec: CommandLine, tmp_path: Path, output: Path) -> None:
    nodes = [node("Sub", ["i", "base"], ["k"]), node("Gather", ["w", "k"], ["y"], name="table")]
    constants = {"w": np.zeros((4, 40), np.float32), "base": np.array(9)}
    inputs = [("i", TensorProto.INT64, (3,))]
    model = write_model(tmp_path / "m.onnx", nodes, inputs, [floats("y", 3, 40)], constants=constants)
    assert "--example NAME=FILE.npy" in nimblec.refused("compile", model, "-o", output, "--target", "cpu", "-q")
    assert_untouched(output)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_package", r"cannot be imported: line 1 of .*users\.py raised ModuleNotFoundError: .*"),
        ("def f(:", r"cannot be imported: SyntaxError: .*users\.py, line 1\)"),
        ("import sys\nsys.exit()", r"cannot be imported: line 2 of .*users\.py raised SystemExit"),
        ("import sys\ndef f():\n    sys.exit(0)", r"cannot be called: line 3 of .*users\.py raised SystemExit: 0"),
        ("g = 1", r"users has no callable 'f'"),
        ("def f():\n    return {}['size']", r"cannot be called: line 2 of .*users\.py raised KeyError: 'size'"),
        ("def f():\n    return 3", r"returned int, expected \(module, example_inputs\), .*"),
    ],
)
def test_a_mistake_in_a_module_of_the_users(
    nimblec: CommandLine, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    (tmp_path / "users.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users", raising=False)
    sentence = nimblec.refused("compile", "users:f", "-o", output, "--target", "cpu", "-q")
    assert re.fullmatch(rf"users:f: (users )?{said}", sentence), sentence
    assert_untouched(output)


# --- outputs


def test_a_plan_may_not_replace_what_it_is_made_of(nimblec: CommandLine, tmp_path: Path) -> None:
    model, array = tmp_path / "m.onnx", tmp_path / "x.npy"
    model.write_bytes(DIGITS.read_bytes())
    np.save(array, np.zeros((1, 1, 8, 8), np.float32))
    (tmp_path / "link").symlink_to(model)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for output in (model, tmp_path / "link", array, tmp_path / "." / "m.onnx"):
        sentence = nimblec.refused("compile", model, "-o", output, "--target", "cpu", "--example", f"image={array}")
        assert f"{output}: is read by this compilation, and would be overwritten" in sentence
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_compile_refuses_to_replace_data(nimblec: CommandLine, tmp_path: Path) -> None:
    model, data, empty = tmp_path / "m.onnx", tmp_path / "m.data", tmp_path / "empty"
    whole = onnx.load(DIGITS)
    onnx.save(whole, model, save_as_external_data=True, location=data.name, size_threshold=256)
    empty.touch()
    before = data.read_bytes()
    for output in (data, Path(os.path.relpath(data))):
        sentence = nimblec.refused("compile", model, "-o", output, "--target", "cpu")
        assert f"{output}: exists and is not a plan: remove it, or name another PLAN" in sentence
    assert data.read_bytes() == before
    for _ in range(2):  # over nothing, and over a plan
        assert nimblec("compile", model, "-o", empty, "--target", "cpu", "-q").status == 0


def test_a_plan_replaces_files_only(nimblec: CommandLine, tmp_path: Path) -> None:
    """As root, `-o /dev/null` would take the machine's null device away."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    before = {path.name: path.lstat().st_ino for path in tmp_path.iterdir()}
    for name, kind in (("pipe", "a pipe"), ("link", "a pipe"), ("folder", "a folder"), ("/dev/full", "a device")):
        sentence = nimblec.refused("compile", DIGITS, "-o", tmp_path / name, "--target", "cpu", "-q")
        assert sentence == f"{tmp_path / name}: is {kind}, expected the name of a file to write"
    assert {path.name: path.lstat().st_ino for path in tmp_path.iterdir()} == before


def test_a_plan_is_written_through_a_link(nimblec: CommandLine, tmp_path: Path, output: Path) -> None:
    link = tmp_path / "link.plan"
    link.symlink_to(output)
    assert nimblec("compile", DIGITS, "-o", link, "--target", "cpu", "-q").status == 0
    assert link.readlink() == output
    assert read_plan(output) == read_plan(link)
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_an_output_whose_folder_takes_no_files(nimblec: CommandLine, tmp_path: Path) -> None:
    sentence = nimblec.refused("compile", DIGITS, "-o", "/proc/m.plan", "--target", "cpu", "-q")
    assert sentence.startswith("/proc/m.plan: nothing can be written in /proc: ")
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    missing = tmp_path / "missing" / "m.plan"
    sentence = nimblec.refused("compile", DIGITS, "-o", missing, "--target", "cpu", "-q")
    assert sentence == f"{missing}: nothing can be written in {missing.parent}: No such file or directory"
    if os.geteuid():  # who is root may write anyway
        assert "sealed" in nimblec.refused("compile", DIGITS, "-o", sealed / "m.plan", "--target", "cpu", "-q")


def command(output: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "nimblec", "compile", str(DIGITS), "-o", str(output), "--target", "cpu", *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("limit", [0, 60_000])
def test_a_full_disk(output: Path, limit: int, tmp_path: Path) -> None:
    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    options = ("-q", "--timing-cache", str(tmp_path / "timings.json"))
    done = subprocess.run(
        command(output, *options),
        capture_output=True,
        text=True,
        check=False,
        env={**environment(), "TMPDIR": str(tmp_path)},
        preexec_fn=fill,
        timeout=120,
    )
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert "File too large" in line or "is the disk full?" in line
    assert_untouched(output)


def scratch_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".nimblec-")]


KILLED = """
import os, signal, sys
from pathlib import Path
from nimblec.compiler import compile_model
from nimblec.base.options import Options
def observe(stage, seconds):
    if stage == sys.argv[3] and seconds is not None:
        os.kill(os.getpid(), signal.SIGKILL)
compile_model(sys.argv[1], options=Options(target="cpu", plan_cache=None), output=Path(sys.argv[2]), observer=observe)
"""


@pytest.mark.parametrize("stage", ["read", "optimise", "golden run", "write"])
def test_killed_half_way(nimblec: CommandLine, digits: Path, stage: str) -> None:
    """The older plan stays usable; the next compilation removes what the killed one left."""
    before = digits.read_bytes()
    killed = [sys.executable, "-c", KILLED, str(DIGITS), str(digits), stage]
    assert subprocess.run(killed, env=environment(), check=False, timeout=60).returncode == -signal.SIGKILL
    assert digits.read_bytes() == before
    assert nimblec("run", digits).status == 0
    (left,) = scratch_folders(digits.parent)
    with scratch_folder(digits.parent) as mine:
        assert scratch_folders(digits.parent) == [mine]
        with scratch_folder(digits.parent) as other:  # leaves those alone that are in use
            assert sorted(scratch_folders(digits.parent)) == sorted([mine, other])
    assert not left.exists()
    assert list(digits.parent.iterdir()) == [digits]


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Return the digits sample, compiled for the CPU."""
    import nimblec

    path = tmp_path / "plans" / "digits.plan"
    path.parent.mkdir()
    nimblec.compile(DIGITS, target="cpu").save(path)
    return path


# --- the same bytes each time


def test_the_same_file_compiles_to_the_same_bytes(tmp_path: Path) -> None:
    """In processes of their own, whose hashes of strings differ; with one timing cache, so that both choose alike."""
    plans = [tmp_path / "a.plan", tmp_path / "b.plan"]
    for plan, seed in zip(plans, ("1", "2"), strict=True):
        subprocess.run(
            command(plan, "-q", "--timing-cache", str(tmp_path / "timings.json")),
            check=True,
            env={**environment(), "PYTHONHASHSEED": seed},
            timeout=120,
        )
    assert plans[0].read_bytes() == plans[1].read_bytes()


# --- plans for other machines


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (
            replace(H200, name="NVIDIA A100", compute_capability=(8, 0)),
            ["compute capability 9.0 (NVIDIA H200)", "8.0 (NVIDIA A100)"],
        ),
        (replace(H200, driver_version=12040), ["a driver for CUDA 13.0 or newer", "for CUDA 12.4: update the driver"]),
    ],
)
def test_a_plan_for_another_gpu_or_a_newer_driver_names_both(
    nimblec: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Device, words: list[str]
) -> None:
    monkeypatch.setattr(driver, "initialise", lambda: None)
    monkeypatch.setattr(driver, "describe", lambda _ordinal: here)
    path = tmp_path / "cuda.plan"
    encoder.write(cuda_plan(), path)
    sentence = nimblec.refused("run", path)
    assert [word for word in words if word not in sentence] == []
    assert "skipped  golden: " + sentence in nimblec("verify", path).out
