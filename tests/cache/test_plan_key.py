"""The key of a plan: all that its bytes depend on is in it, and nothing else."""

import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from plan_caching import Compiler, change_byte, compiled, onnx_source, write_model
from plans import H200

import nimblec
from nimblec.base.options import InputSpec, NamedInput, Options
from nimblec.plan import plan_key
from nimblec.plan.plan_key import PlanKey, find_key
from nimblert.cuda import driver
from nimblert.plan import Target


def key_of(path: Path, options: Options, target: Target = Target.CPU) -> PlanKey | None:
    return find_key(onnx_source(path), target, options)


CHANGES: dict[str, Any] = {
    "inputs": (InputSpec(name="x", shape=(4, 8)),),
    "named_inputs": (NamedInput(name="x", shape=(4, "n")),),
    "dims": (("n", 5),),
    "sizes": (("n", (1, 2)),),
    "pad_masks": ("x",),
    "level": 1,
    "precision": "fp16",
    "max_error": 0.125,
    "approximate": True,
    "trip_limit": 7,
    "bounds": (("y", (4,)),),
    "print_passes": True,
    "refittable": True,
    "streams": "max",
    "memory_limit": 1000,
    "reproducible": True,
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_option_is_in_the_key(model: Path, options: Options, name: str) -> None:
    assert key_of(model, replace(options, **{name: CHANGES[name]})) != key_of(model, options)


ARRAYS = ("constants", "examples")


def test_no_option_is_forgotten() -> None:
    """A new option is in the key by itself, and wants a line above."""
    assert {field.name for field in fields(Options)} == {*CHANGES, *ARRAYS, "target", "timing_cache", "plan_cache"}


X = np.arange(32, dtype=np.int32).reshape(4, 8)
GIVEN: list[Any] = [
    (),
    (("x", X),),
    (("y", X),),
    (("x", X + 1),),
    (("x", X.reshape(8, 4)),),
    (("x", X.view(np.float32)),),
    (("x", X), ("y", X)),
]


@pytest.mark.parametrize("option", ARRAYS)
def test_plan_key_holds_arrays_not_folders(tmp_path: Path, model: Path, options: Options, option: str) -> None:
    keys = {key_of(model, replace(options, **{option: given})) for given in GIVEN}
    assert len(keys) == len(GIVEN)
    elsewhere = replace(options, timing_cache=tmp_path / "other.json", plan_cache=tmp_path / "other")
    assert key_of(model, elsewhere) == key_of(model, options) is not None
    same, copied = (replace(options, **{option: (("x", array),)}) for array in (X, X.copy()))
    assert key_of(model, copied) == key_of(model, same)


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


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08"])
def test_what_is_no_model_gives_no_key(tmp_path: Path, options: Options, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    stub = Compiler()
    for _ in range(2):
        compiled(stub, tmp_path / "m.onnx", options)
    assert stub.calls == 2 - (content == b"")  # a model without anything is one, which the compiler refuses


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_FREEZING", "TRITON_PTXAS_PATH", "MKL_CBWR"])
def test_plan_key_holds_framework_variables(
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
def test_plan_key_ignores_other_variables(
    model: Path, options: Options, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = key_of(model, options)
    monkeypatch.setenv(name, "/another")
    assert key_of(model, options) == before


def install(folder: Path, version: str, record: str = "") -> None:
    """Write a package's metadata into a folder, as pip leaves them."""
    about = folder / "torch-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (about / "RECORD").write_text(record)


@pytest.mark.usefixtures("changing_software")
def test_plan_key_holds_packages(
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


def test_a_folder_that_an_import_adds_to_the_path_changes_no_key(
    tmp_path: Path, model: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As importing setuptools does, which torch may do after the first key of a process."""
    software = plan_key._software_at_first.__wrapped__
    monkeypatch.setattr(plan_key, "_software", software)
    monkeypatch.setattr(plan_key, "_software_at_first", cache(software))
    before = key_of(model, options)
    install(tmp_path / "vendored", "2.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "vendored")])
    assert key_of(model, options) == before is not None


@pytest.mark.usefixtures("changing_software")
@pytest.mark.parametrize("target", [Target.CPU, Target.CUDA])
def test_plan_key_holds_source(
    tmp_path: Path, model: Path, options: Options, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    devices = [replace(H200, driver_version=12080), H200, replace(H200, multiprocessor_count=66)]
    monkeypatch.setattr(driver, "describe", lambda: devices[0])
    package = tmp_path / "nimblert"
    (package / "part").mkdir(parents=True)
    seen = [key_of(model, options, target)]
    monkeypatch.setattr(plan_key, "package_folders", lambda: (package,))
    seen.append(key_of(model, options, target))
    (package / "part" / "a.py").write_text("")
    seen.append(key_of(model, options, target))
    (package / "part" / "a.py").rename(package / "a.py")
    seen.append(key_of(model, options, target))
    monkeypatch.setattr(sys, "version", f"{sys.version} another")
    seen.append(key_of(model, options, target))
    monkeypatch.setattr("nimblec.plan.plan_key.processor", lambda: "Z80 x 1")
    seen.append(key_of(model, options, target))
    for device in devices[1:] if target is Target.CUDA else ():
        monkeypatch.setattr(driver, "describe", lambda device=device: device)
        seen.append(key_of(model, options, target))
    assert None not in seen
    assert len(set(seen)) == len(seen)


def test_plan_key_holds_absent_gpu(model: Path, options: Options) -> None:
    keys = {key_of(model, replace(options, target=target), Target.CUDA) for target in ("sm_80", "sm_90")}
    assert None not in keys
    assert len(keys) == 2


def test_the_target_is_in_the_key(model: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "describe", lambda: H200)
    assert key_of(model, options) != key_of(model, options, Target.CUDA)
