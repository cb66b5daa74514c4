"""The plan cache: what is compiled twice is compiled once, and nothing else is taken for it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import CommandLine
from onnx import TensorProto, helper, numpy_helper
from plans import H200
from subprocesses import python

import nimblec
from nimblec import compiler
from nimblec.cache import plan_key
from nimblec.cache.plan_cache import PlanCache, compile_once
from nimblec.cache.plan_key import PlanKey, find_key
from nimblec.options import InputSpec, Observer, Options
from nimblec.processes import environment, module_command
from nimblec.source import Source
from nimblert import driver
from nimblert.plan import Target

KEY = "0123456789abcdef" * 4


def unobserved(stage: str, seconds: float | None) -> None:
    """Nobody looks at the stages."""


def write_model(path: Path, *, seed: int = 0, external: bool = False) -> Path:
    """Relu of ``x @ w``, the weights in the file or in weights.bin beside it."""
    w = np.random.default_rng(seed).standard_normal((8, 8), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path, save_as_external_data=external, location="weights.bin", size_threshold=0)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose weights are in a file of their own."""
    return write_model(tmp_path / "m.onnx", external=True)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Options with a plan cache."""
    return Options(target="cpu", dims=(("n", 4),), timing_cache=tmp_path / "t.json", plan_cache=tmp_path / "plans")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a new process for the key: what was installed at first is what is installed now."""
    monkeypatch.setattr(plan_key, "_software_at_first", plan_key._software)


class Compiler:
    """Writes a plan of its own each time, and counts."""

    def __init__(self, during: Callable[[], object] = bool) -> None:
        self.calls = 0
        self._during = during

    def __call__(self, source: Source, options: Options, output: Path, observer: Observer) -> tuple[str, ...]:
        """Compile."""
        del source, options, observer
        self.calls += 1
        self._during()
        output.write_bytes(b"plan %d" % self.calls)
        return (f"note {self.calls}",)


def onnx_source(path: Path) -> Source:
    return Source(kind="onnx", model=str(path.resolve()))


def compiled(compiler: Compiler, model: Path, options: Options) -> tuple[bytes, tuple[str, ...]]:
    """What `compile_once` writes, and what it says."""
    output = model.parent / "written"
    notes = compile_once(compiler, onnx_source(model), Target.CPU, options, output, unobserved)
    return output.read_bytes(), notes


# --- the same again


def test_a_second_compilation_gives_the_same_file_and_compiles_nothing(
    nimblec: CommandLine, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, kept = tmp_path / "m.plan", tmp_path / "plans"
    command = ("compile", model, "-o", output, "--target", "cpu", "--dim", "n=4", "--plan-cache", kept, "-v")
    first = nimblec(*command)
    assert first.status == 0, first.err
    assert "taken from the plan cache" not in first.out
    written = output.read_bytes()
    output.write_bytes(b"another file of that name")
    monkeypatch.setattr(compiler, "_compile", pytest.fail)
    second = nimblec(*command)
    assert second.status == 0, second.err
    assert output.read_bytes() == written
    notes = [line for line in second.out.splitlines() if line.startswith("note: ")]
    assert "taken from the plan cache, where a compilation of" in notes[-1]
    (stage,) = second.err.splitlines()
    assert stage.startswith("read the plan cache: ")


HIT = """
import sys
from pathlib import Path
import nimblec
options = dict(target="cpu", dims={"n": 4}, plan_cache=Path(sys.argv[2]))
print(len(nimblec.compile(sys.argv[1], **options).kernels))
print(sorted({"torch", "triton", "onnxruntime", "scipy"} & set(sys.modules)))
"""


def test_a_plan_that_is_kept_needs_no_framework(tmp_path: Path, model: Path) -> None:
    first = python(HIT, model, tmp_path / "plans").splitlines()
    assert "onnxruntime" in first[1]
    assert python(HIT, model, tmp_path / "plans").splitlines() == [first[0], "[]"]


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_a_users_second_compilation_is_a_hit(tmp_path: Path, model: Path, kind: str) -> None:
    """With nothing in the environment that only the tests set, and the cache where a user has it."""
    if kind == "pt2":
        import torch

        model = tmp_path / "m.pt2"
        torch.export.save(torch.export.export(torch.nn.Linear(8, 8).eval(), (torch.zeros(4, 8),)), model)
    clean = {k: v for k, v in environment().items() if not k.startswith("ORT_")} | {"HOME": str(tmp_path / "home")}
    dims = ["--dim", "n=4"] if kind == "onnx" else []
    command = [*module_command("nimblec", "compile"), str(model), "-o", str(tmp_path / "m.plan"), "--target", "cpu"]
    first, second = (
        subprocess.run([*command, *dims], env=clean, capture_output=True, text=True, check=True, timeout=120).stdout
        for _ in range(2)
    )
    assert "plan cache" not in first.replace("write the plan cache", "").replace("read the plan cache", "")
    assert "note: taken from the plan cache" in second


def test_a_plan_in_memory_comes_from_the_cache_too(
    model: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler.compile_model(model, options=options, observer=unobserved)
    monkeypatch.setattr(compiler, "_compile", pytest.fail)
    again = compiler.compile_model(model, options=options, observer=unobserved)
    assert again.plan.programs == first.plan.programs
    assert [stage for stage, _ in again.stages] == ["read the plan cache"]


def test_a_model_that_was_moved_is_the_same(tmp_path: Path, model: Path, options: Options) -> None:
    stub = Compiler()
    compiled(stub, model, options)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("m.onnx", "weights.bin"):
        (tmp_path / name).rename(moved / name)
    compiled(stub, moved / "m.onnx", options)
    assert stub.calls == 1


def test_a_link_stands_for_what_it_leads_to(tmp_path: Path, options: Options) -> None:
    one, other = (write_model(tmp_path / f"{seed}.onnx", seed=seed) for seed in (1, 2))
    link, stub = tmp_path / "link.onnx", Compiler()
    link.symlink_to(one)
    compiled(stub, link, options)
    assert compiled(stub, one, options)[0] == b"plan 1"
    link.unlink()
    link.symlink_to(other)
    assert compiled(stub, link, options)[0] == b"plan 2"


# --- the key


def key_of(path: Path, options: Options, target: Target = Target.CPU) -> PlanKey | None:
    return find_key(onnx_source(path), target, options)


CHANGES: dict[str, Any] = {
    "inputs": (InputSpec(name="x", shape=(4, 8)),),
    "dims": (("n", 5),),
    "level": 1,
    "precision": "fp16",
    "max_error": 0.125,
    "print_passes": True,
    "streams": "max",
    "memory_limit": 1000,
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_option_is_in_the_key(model: Path, options: Options, name: str) -> None:
    assert key_of(model, replace(options, **{name: CHANGES[name]})) != key_of(model, options)


def test_no_option_is_forgotten() -> None:
    """A new option is in the key by itself, and wants a line above."""
    assert {field.name for field in fields(Options)} == {*CHANGES, "target", "examples", "timing_cache", "plan_cache"}


X = np.arange(32, dtype=np.int32).reshape(4, 8)
EXAMPLES = [
    (),
    (("x", X),),
    (("y", X),),
    (("x", X + 1),),
    (("x", X.reshape(8, 4)),),
    (("x", X.view(np.float32)),),
    (("x", X), ("y", X)),
]


def test_examples_are_in_the_key_and_where_caches_lie_is_not(tmp_path: Path, model: Path, options: Options) -> None:
    keys = {key_of(model, replace(options, examples=examples)) for examples in EXAMPLES}
    assert len(keys) == len(EXAMPLES)
    elsewhere = replace(options, timing_cache=tmp_path / "other.json", plan_cache=tmp_path / "other")
    assert key_of(model, elsewhere) == key_of(model, options) is not None
    copied = replace(options, examples=(("x", X.copy()),))
    assert key_of(model, copied) == key_of(model, replace(options, examples=(("x", X),)))


def change_byte(path: Path, offset: int = -1) -> None:
    """Flip a byte, and leave size and time of the file as they were."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("name", ["m.onnx", "weights.bin"])
def test_every_byte_of_the_model_is_in_the_key(tmp_path: Path, model: Path, options: Options, name: str) -> None:
    before = key_of(model, options)
    change_byte(tmp_path / name)
    after = key_of(model, options)
    assert before is not None
    assert after is not None
    assert before.digest != after.digest


def test_data_of_tensors_that_are_no_initializers_are_in_the_key(tmp_path: Path, options: Options) -> None:
    """A constant's value, and the parts of a sparse one."""
    parts = []
    for name, array in (("c", np.ones(4, np.float32)), ("v", np.ones(1, np.float32)), ("i", np.zeros(1, np.int64))):
        tensor = numpy_helper.from_array(array, name)
        (tmp_path / name).write_bytes(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, name)
        tensor.ClearField("raw_data")
        parts.append(tensor)
    sparse = helper.make_sparse_tensor(parts[1], parts[2], [4])
    nodes = [
        helper.make_node("Constant", [], ["c"], value=parts[0]),
        helper.make_node("Constant", [], ["s"], sparse_value=sparse),
        helper.make_node("Add", ["c", "s"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])])
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=9).SerializeToString())
    seen = {key_of(path, options)}
    for name in "cvi":
        change_byte(tmp_path / name)
        seen.add(key_of(path, options))
    assert None not in seen
    assert len(seen) == 4


@pytest.mark.parametrize("location", ["../weights.bin", "/weights.bin", "missing.bin"])
def test_data_that_the_front_end_refuses_give_no_key(tmp_path: Path, options: Options, location: str) -> None:
    (tmp_path / "models").mkdir()
    path = write_model(tmp_path / "models" / "m.onnx", external=True)
    (tmp_path / "models" / "weights.bin").rename(tmp_path / "weights.bin")
    found = onnx.load(path, load_external_data=False)
    found.graph.initializer[0].external_data[0].value = location
    path.write_bytes(found.SerializeToString())
    assert key_of(path, options) is None
    with pytest.raises(nimblec.CompileError, match=r"weights\.bin|missing\.bin"):
        nimblec.compile(path, target="cpu", dims={"n": 4}, plan_cache=tmp_path / "plans")


@pytest.mark.parametrize("name", [b"\xff\xfe", b"\0a", b".."])
def test_names_of_data_files_that_are_none_give_no_key(tmp_path: Path, options: Options, name: bytes) -> None:
    path = write_model(tmp_path / "m.onnx", external=True)
    found = onnx.load(path, load_external_data=False)
    found.graph.initializer[0].external_data[0].value = "Z" * len(name)
    path.write_bytes(found.SerializeToString().replace(b"Z" * len(name), name))
    assert key_of(path, options) is None


def test_a_pipe_is_not_read_for_the_key(tmp_path: Path, options: Options) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    assert key_of(tmp_path / "m.onnx", options) is None


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08"])
def test_what_is_no_model_gives_no_key(tmp_path: Path, options: Options, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    stub = Compiler()
    for _ in range(2):
        compiled(stub, tmp_path / "m.onnx", options)
    assert stub.calls == 2 - (content == b"")  # a model without anything is one, which the compiler refuses


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_FREEZING", "TRITON_PTXAS_PATH", "MKL_CBWR"])
def test_variables_that_steer_the_frameworks_are_in_the_key(
    model: Path, options: Options, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen = set()
    monkeypatch.delenv(name, raising=False)
    seen.add(key_of(model, options))
    for value in ("", "1", "\udcff"):
        monkeypatch.setenv(name, value)
        seen.add(key_of(model, options))
    assert len(seen) == 4


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PWD", "PYTHONHASHSEED"])
def test_variables_that_change_no_plan_are_not(
    model: Path, options: Options, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = key_of(model, options)
    monkeypatch.setenv(name, "/another")
    assert key_of(model, options) == before


def install(folder: Path, version: str, record: str = "") -> None:
    """A package's metadata in a folder, as pip leaves them."""
    about = folder / "torch-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (about / "RECORD").write_text(record)


def test_installed_packages_are_in_the_key(
    tmp_path: Path, model: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {key_of(model, options)}
    one, other = tmp_path / "one", tmp_path / "other"
    for path in ([one], [other], [one, other], [other, one]):
        install(one, "2.0")
        install(other, "2.1")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*map(str, path), *sys.path])
            seen.add(key_of(model, options))
            install(one, "2.0", "torch/__init__.py,sha256=abc,1")
            seen.add(key_of(model, options))
            install(one, "2.2")
            seen.add(key_of(model, options))
    assert len(seen) == 1 + 3 + 1 + 3 + 3


@pytest.mark.parametrize("target", [Target.CPU, Target.CUDA])
def test_our_source_python_and_the_machine_are_in_the_key(
    tmp_path: Path, model: Path, options: Options, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    devices = [replace(H200, driver_version=12080), H200, replace(H200, multiprocessor_count=66)]
    monkeypatch.setattr(driver, "describe", lambda: devices[0])
    package = tmp_path / "nimblert"
    (package / "part").mkdir(parents=True)
    seen = [key_of(model, options, target)]
    monkeypatch.setattr(plan_key, "nimblert", SimpleNamespace(__path__=[str(package)]))
    seen.append(key_of(model, options, target))
    (package / "part" / "a.py").write_text("")
    seen.append(key_of(model, options, target))
    (package / "part" / "a.py").rename(package / "a.py")
    seen.append(key_of(model, options, target))
    monkeypatch.setattr(sys, "version", f"{sys.version} another")
    seen.append(key_of(model, options, target))
    monkeypatch.setattr("nimblec.cache.plan_key.processor", lambda: "Z80 x 1")
    seen.append(key_of(model, options, target))
    for device in devices[1:] if target is Target.CUDA else ():
        monkeypatch.setattr(driver, "describe", lambda device=device: device)
        seen.append(key_of(model, options, target))
    assert None not in seen
    assert len(set(seen)) == len(seen)


def test_the_target_is_in_the_key(model: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "describe", lambda: H200)
    assert key_of(model, options) != key_of(model, options, Target.CUDA)


def test_software_that_was_exchanged_under_a_process_gives_no_key(
    model: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_key, "_software_at_first", lambda: "as it was")
    assert key_of(model, options) is None


# --- what is not kept


def test_callables_and_live_modules_are_compiled_each_time(tmp_path: Path, options: Options) -> None:
    stub = Compiler()
    for kind in ("callable", "saved"):
        for _ in range(2):
            source = Source(kind=kind, model="package.module:name")
            compile_once(stub, source, Target.CUDA, options, tmp_path / "m.plan", unobserved)
    assert stub.calls == 4
    assert not (tmp_path / "plans").exists()


def test_an_exported_program_is_kept_unless_torch_is_in_this_process(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.pt2").write_bytes(b"exported")
    source, stub = Source(kind="exported", model=str(tmp_path / "m.pt2")), Compiler()
    monkeypatch.setattr(driver, "describe", lambda: H200)
    for target, calls in ((Target.CPU, 1), (Target.CUDA, 2)):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        for _ in range(2):
            compile_once(stub, source, target, options, tmp_path / "m.plan", unobserved)
            assert stub.calls == calls
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    compile_once(stub, source, Target.CUDA, options, tmp_path / "m.plan", unobserved)
    assert stub.calls == 2
    compile_once(stub, source, Target.CPU, options, tmp_path / "m.plan", unobserved)
    assert stub.calls == 3


def test_a_model_that_is_written_during_its_compilation_is_not_kept(
    tmp_path: Path, model: Path, options: Options
) -> None:
    def write_and_write_back() -> None:
        change_byte(tmp_path / "weights.bin")
        change_byte(tmp_path / "weights.bin")

    for during in (lambda: write_model(model, seed=1, external=True), write_and_write_back):
        compiled(Compiler(during), model, options)
        assert list((tmp_path / "plans").iterdir()) == []
    stub = Compiler()
    compiled(stub, model, options)
    assert stub.calls == 1


def test_a_failed_compilation_is_not_kept(tmp_path: Path, options: Options) -> None:
    model = write_model(tmp_path / "m.onnx")
    for _ in range(2):
        with pytest.raises(nimblec.CompileError, match="dynamic dimension"):
            compiler.compile_model(model, options=replace(options, dims=()), observer=unobserved)
    assert list((tmp_path / "plans").iterdir()) == []


def test_no_plan_cache_is_none(nimblec: CommandLine, tmp_path: Path, model: Path, options: Options) -> None:
    stub = Compiler()
    for _ in range(2):
        compiled(stub, model, replace(options, plan_cache=None))
    assert stub.calls == 2
    command = ("compile", model, "-o", tmp_path / "m.plan", "--target", "cpu", "--dim", "n=4", "--no-plan-cache")
    assert "plan cache" not in nimblec(*command).out
    assert "--plan-cache" in nimblec.refused(*command, "--plan-cache", tmp_path / "plans")
    assert not (tmp_path / "plans").exists()


# --- what goes wrong


def swap_records(plan: Path, record: Path) -> None:
    found = json.loads(record.read_text())
    record.write_text(json.dumps(found | {"sha256": "0" * 64}))
    assert plan.exists()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def change_record(record: Path, **changes: object) -> None:
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))


def put_another_pair(plan: Path, record: Path) -> None:
    """Both files of another model's entry, under this one's key."""
    cache = PlanCache(plan.parent / "elsewhere")
    assert cache.problem() is None
    plan.write_bytes(b"another plan")
    assert cache.keep(KEY, plan, (), 1.0) is None
    for path in (plan, record):
        (plan.parent / "elsewhere" / KEY).with_suffix(path.suffix).replace(path)
    (plan.parent / "elsewhere").rmdir()


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a changed byte": lambda plan, _: change_byte(plan),
    "cut short": lambda plan, _: os.truncate(plan, 3),
    "empty": lambda plan, _: os.truncate(plan, 0),
    "no plan": lambda plan, _: plan.unlink(),
    "no record": lambda _, record: record.unlink(),
    "an empty record": lambda _, record: os.truncate(record, 0),
    "not JSON": lambda _, record: record.write_bytes(b"\xff{"),
    "other JSON": lambda _, record: record.write_text('{"sha256": 3}'),
    "another plan's record": swap_records,
    "another pair": put_another_pair,
    "a record nested too deep": lambda _, record: record.write_text("[" * 100_000),
    "an absurd time": lambda _, record: change_record(record, seconds=1e300),
    "no time": lambda _, record: change_record(record, seconds=float("nan")),
    "a pipe for a plan": lambda plan, _: pipe(plan),
    "a pipe for a record": lambda _, record: pipe(record),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_compiled_again(tmp_path: Path, model: Path, options: Options, damage: str) -> None:
    stub = Compiler()
    compiled(stub, model, options)
    plan, record = sorted((tmp_path / "plans").iterdir(), key=lambda path: path.suffix == ".json")
    DAMAGE[damage](plan, record)
    content, notes = compiled(stub, model, options)
    assert (content, notes[0]) == (b"plan 2", "note 2")
    said = [] if damage in {"no plan", "no record"} else [f"the plan cache's entry {plan} is damaged, and is replaced"]
    assert [note.partition(": ")[0] for note in notes[1:]] == said
    content, notes = compiled(stub, model, options)
    assert (content, notes[0], stub.calls) == (b"plan 2", "note 2", 2)


def test_a_folder_that_cannot_be_is_said_and_no_error(tmp_path: Path, model: Path, options: Options) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "plans"):
        stub = Compiler()
        content, notes = compiled(stub, model, replace(options, plan_cache=folder))
        assert content == b"plan 1"
        assert notes[0] == "note 1"
        assert str(folder) in notes[1]


def test_a_folder_that_cannot_be_written_is_said_and_no_error(model: Path, options: Options) -> None:
    content, notes = compiled(Compiler(), model, replace(options, plan_cache=Path("/proc")))
    assert content == b"plan 1"
    assert notes[1].startswith("not kept in the plan cache /proc: ")


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    plan, folder = tmp_path / "p", tmp_path / "plans"
    folder.mkdir()
    (folder / "mine.plan").write_bytes(bytes(1000))
    cache = PlanCache(folder, limit_nbytes=300)
    keys = [KEY[:-1] + digit for digit in "abcde"]

    def kept() -> list[str]:
        names = {path.stem for path in folder.iterdir()} - {"mine"}
        assert {path.name for path in folder.iterdir()} == {
            "mine.plan", *(f"{n}.plan" for n in names), *(f"{n}.json" for n in names),
        }  # fmt: skip
        return sorted(name[-1] for name in names)

    plan.write_bytes(bytes(100))
    for age, key in enumerate(keys[:3]):
        assert cache.keep(key, plan, (), 1.0) is None
        os.utime(folder / f"{key}.plan", (age, age))
    assert kept() == ["a", "b", "c"]
    assert cache.copy(keys[0], tmp_path / "out")[0] is not None
    cache.keep(keys[3], plan, (), 1.0)
    assert kept() == ["a", "c", "d"]
    plan.write_bytes(bytes(250))
    cache.keep(keys[4], plan, (), 1.0)
    assert kept() == ["e"]
    plan.write_bytes(bytes(301))
    said = cache.keep(keys[0], plan, (), 1.0)
    assert said is not None
    assert "300 bytes" in said
    assert kept() == ["e"]


def test_two_processes_at_once_leave_one_good_plan(tmp_path: Path, model: Path) -> None:
    def start(plan: str) -> "subprocess.Popen[bytes]":
        options = ("--target", "cpu", "--dim", "n=4", "--streams", "1", "--timing-cache", str(tmp_path / "t.json"))
        command = [sys.executable, "-m", "nimblec", "compile", str(model), "-o", str(tmp_path / plan), *options]
        return subprocess.Popen([*command, "--plan-cache", str(tmp_path / "plans"), "-q"], env=environment())

    for plans in (("a.plan", "b.plan"), ("c.plan", "d.plan")):
        assert [process.wait(120) for process in [start(plan) for plan in plans]] == [0, 0]
    a, b, c, d = ((tmp_path / f"{name}.plan").read_bytes() for name in "abcd")
    assert c == d
    assert c in (a, b)  # each measured for itself, and the later one is kept
    assert sorted(path.suffix for path in (tmp_path / "plans").iterdir()) == [".json", ".plan"]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from nimblec.cache import plan_cache
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{patch}
plan_cache.PlanCache(Path(sys.argv[1])).keep(sys.argv[2], Path(sys.argv[3]), (), 1.0)
"""
KILLS = {
    "while it copies": "shutil.copyfile = lambda _, to: (to.write_bytes(b'pl'), die())",
    "before the plan is there": "Path.replace = die",
    "before the record is there": "replace = Path.replace\n"
    "Path.replace = lambda path, to: die() if to.suffix == '.json' else replace(path, to)",
}


@pytest.mark.parametrize("when", KILLS)
def test_a_killed_process_leaves_nothing_that_is_used(tmp_path: Path, when: str) -> None:
    folder, plan, output = tmp_path / "plans", tmp_path / "p", tmp_path / "out"
    folder.mkdir()
    plan.write_bytes(b"plan")
    code = KILLED.format(patch=KILLS[when])
    arguments = [sys.executable, "-c", code, str(folder), KEY, str(plan)]
    assert subprocess.run(arguments, env=environment(), check=False).returncode < 0
    cache = PlanCache(folder)
    assert cache.copy(KEY, output) == (None, None)
    assert cache.keep(KEY, plan, ("note",), 1.0) is None
    assert sorted(path.name for path in folder.iterdir()) == [f"{KEY}.json", f"{KEY}.plan"]
    found, _ = cache.copy(KEY, output)
    assert found is not None
    assert (found.notes, output.read_bytes()) == (("note",), b"plan")


def test_metadata_of_an_egg_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "torch.egg-info"
    about.mkdir()
    (about / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert plan_key._packages() == [[str(tmp_path), "", (about / "PKG-INFO").read_text(), ""]]


def test_the_order_of_names_is_not_in_the_key() -> None:
    assert plan_key._digest([{"a": 1, "b": 2}]) == plan_key._digest([{"b": 2, "a": 1}])
    assert plan_key._digest([{"a": 1, "b": 2}]) != plan_key._digest([{"a": 2, "b": 1}])
