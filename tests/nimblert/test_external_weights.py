"""Plans without their weights, which a safetensors file holds."""

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import CommandLine
from copying import copying, drawn
from onnx import TensorProto, helper, numpy_helper

import nimblert
from nimblec.plan import encoder, signing, stripping
from nimblert import InputError
from nimblert.check.verify import read_plan
from nimblert.plan import ITEM_NBYTES, Memcpy, Plan, Pointer, Region, Weight
from nimblert.plan.external import filled, names

pytest_plugins = ("gpu_memory",)

SIZE = 512
SHAPE = (6, 8)
NBYTES = 6 * 8 * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an ONNX file with 2 MiB of weights."""
    path = tmp_path_factory.mktemp("model") / "mlp.onnx"
    nodes, value, initializers = [], "x", []
    for i in range(2):
        weight, bias = drawn(i, (SIZE, SIZE)) / SIZE, drawn(i, (SIZE,))
        initializers += [numpy_helper.from_array(weight, f"w{i}"), numpy_helper.from_array(bias, f"b{i}")]
        nodes.append(helper.make_node("Gemm", [value, f"w{i}", f"b{i}"], [value := f"y{i}"]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, SIZE]) for name in ("x", value))
    graph = helper.make_graph(nodes, "mlp", [x], [y], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def whole(model: Path) -> Path:
    """Return the plan of it."""
    import nimblec

    path = model.with_name("whole.plan")
    nimblec.compile(model, target="cpu").save(path)
    return path


@pytest.fixture
def stripped(whole: Path, tmp_path: Path) -> Path:
    """Return the plan without its weights, which are in ``w.safetensors`` beside it."""
    path = tmp_path / "stripped.plan"
    path.write_bytes(whole.read_bytes())
    stripping.strip(path, tmp_path / "w.safetensors")
    return path


def test_stripped_plan_computes_the_same(whole: Path, stripped: Path) -> None:
    assert stripped.stat().st_size < 0.05 * whole.stat().st_size
    x = drawn(3, (2, SIZE))
    with nimblert.load(whole) as model:
        expected = model(x)
    weights = stripped.with_name("w.safetensors")
    for options in ({}, {"copy": True}):
        with nimblert.load(stripped, weights=weights, **options) as model:
            np.testing.assert_array_equal(model(x), expected)
    with nimblert.load(read_plan(stripped), weights=str(weights)) as model:
        np.testing.assert_array_equal(model(x), expected)
    assert filled(read_plan(stripped), weights) == read_plan(whole)


def test_weights_are_a_file_of_the_safetensors_library(whole: Path, stripped: Path) -> None:
    """It reads what is written here, and what it writes can be loaded."""
    files = pytest.importorskip("safetensors.numpy", reason="needs safetensors: not installed")
    arrays = files.load_file(stripped.with_name("w.safetensors"))
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        weight.name: bytes(weight.data) for weight in read_plan(whole).weights
    }
    files.save_file({**arrays, "more": np.zeros(3)}, stripped.with_name("theirs.safetensors"))
    nimblert.load(stripped, weights=stripped.with_name("theirs.safetensors")).close()


def test_mapped_weights_are_used_in_place(stripped: Path) -> None:
    from nimblert.cpu.host_memory import HostWeights

    plan = filled(read_plan(stripped), stripped.with_name("w.safetensors"))
    memory = HostWeights(plan)
    for weight in plan.weights:
        array, _ = memory.find(weight.offset)
        assert np.shares_memory(array, np.frombuffer(weight.data, np.uint8))


def test_cuda_plan_uploads_weights_and_state_of_the_file(put: object, tmp_path: Path) -> None:
    """The output is the weight "w" after the first run, and the state "w" after the second."""
    del put
    plan = copying(SHAPE, (0, 1))
    (program,) = plan.programs
    (y,) = program.outputs
    path = tmp_path / "cuda.plan"
    for region in (Region.WEIGHTS, Region.STATE):
        copy = Memcpy(dst=y.pointer, src=Pointer(region=region), nbytes=NBYTES, stream=0, op=0)
        held = [
            Weight(name="w", dtype="float32", shape=SHAPE, offset=0, data=memoryview(drawn(seed, SHAPE).tobytes()))
            for seed in range(2)
        ]
        made = replace(
            plan,
            weights=(held[0],),
            weights_nbytes=NBYTES,
            state=(held[1],),
            state_nbytes=NBYTES,
            programs=(replace(program, commands=(copy,), arena_nbytes=0),),
        )
        encoder.write(made, path)
        stripping.strip(path, tmp_path / "w.safetensors")
        with nimblert.load(path, weights=tmp_path / "w.safetensors") as model:
            np.testing.assert_array_equal(model(drawn(2, SHAPE)), drawn(int(region is Region.STATE), SHAPE))
        with pytest.raises(InputError, match="does not hold its weights"):
            nimblert.load(path)


def test_every_dtype_and_name_comes_back(put: object, tmp_path: Path) -> None:
    del put
    named = ["", "", "__metadata__", "same", "same", "same#4", '\n"é', *ITEM_NBYTES]
    dtypes = [*["float32"] * 7, *ITEM_NBYTES]
    data = [memoryview(np.random.default_rng(i).bytes(3 * ITEM_NBYTES[dtype])) for i, dtype in enumerate(dtypes)]
    weights = [
        Weight(name=name, dtype=dtype, shape=(3,), offset=256 * i, data=content)
        for i, (name, dtype, content) in enumerate(zip(named, dtypes, data, strict=True))
    ]
    empty = Weight(name="empty", dtype="int8", shape=(0, 4), offset=256 * len(data), data=memoryview(b""))
    plan = replace(copying(SHAPE, (0, 1)), weights=(*weights, empty), weights_nbytes=empty.offset)
    encoder.write(plan, tmp_path / "whole.plan")
    whole = read_plan(tmp_path / "whole.plan")
    stripping.strip(tmp_path / "whole.plan", tmp_path / "w.safetensors")
    stripped = read_plan(tmp_path / "whole.plan")
    assert not any(weight.data.nbytes for weight in stripped.weights)
    assert len(set(names(stripped))) == len(stripped.weights)
    assert filled(stripped, tmp_path / "w.safetensors") == whole


def test_diff_compares_digests_of_stripped_plans(nimblec: CommandLine, whole: Path, stripped: Path) -> None:
    assert " w0 " not in nimblec("diff", whole, stripped).out
    assert nimblec("diff", stripped, stripped).status == 0
    plan = read_plan(stripped)
    first, *rest = plan.weights
    encoder.write(
        replace(plan, weights=(replace(first, sha256=bytes(32)), *rest)), other := stripped.with_name("other")
    )
    for against in (stripped, whole):
        done = nimblec("diff", against, other)
        assert done.status == 1
        assert f"{first.name}" in done.out
        assert "other values, which a stripped plan does not hold" in done.out


def change_tensor(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def write_header(header: object) -> Callable[[Path], object]:
    """Return a function that writes a file with this header."""
    text = json.dumps(header).encode()
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (change_tensor, r"tensor '\w+' is not that of the plan \(SHA-256 differs\)"),
        (write_header({}), "has no tensor 'w0': these are the weights of another plan"),
        (write_header({"w0": {"data_offsets": [0, 8]}}), "tensor 'w0' is not that of the plan"),
        (write_header({"w0": {"data_offsets": [0, 9]}}), "a tensor is at bytes 0 to 9 of 8"),
        (write_header({"w0": {"data_offsets": [-8, 8]}}), "a tensor is at bytes -8 to 8 of 8"),
        (write_header({"w0": {"data_offsets": ["a", 8]}}), "is no safetensors file, or a damaged one"),
        (write_header({"w0": {"data_offsets": [0.0, 8.0]}}), "is no safetensors file, or a damaged one"),
        (write_header({"w0": 3}), "is no safetensors file, or a damaged one"),
        (write_header([1]), "is no safetensors file, or a damaged one"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "a tensor is at bytes"),
        (lambda path: path.write_bytes(b"\xff" * 100), "is no safetensors file, or a damaged one"),
        (lambda path: path.write_bytes(b"short"), "is no safetensors file, or a damaged one"),
        (lambda path: path.write_bytes(b""), "is empty, expected a safetensors file"),
        (lambda path: path.unlink(), "no such file"),
    ],
)
def test_load_refuses_other_weights(stripped: Path, damage: Callable[[Path], object], why: str) -> None:
    weights = stripped.with_name("w.safetensors")
    damage(weights)
    with pytest.raises((InputError, nimblert.PlanError), match=why) as caught:
        nimblert.load(stripped, weights=weights)
    assert str(caught.value).startswith(f"{weights}: ")


def test_load_refuses_weights_of_the_wrong_kind(whole: Path, stripped: Path) -> None:
    with pytest.raises(
        InputError, match=r"give the file that was written with it, nimblert.load\(PLAN, weights=FILE\)"
    ):
        nimblert.load(stripped)
    with pytest.raises(InputError, match="weights: the plan holds its weights: leave the file out"):
        nimblert.load(whole, weights=stripped.with_name("w.safetensors"))
    with pytest.raises(InputError, match="weights: got dict, expected the path of a safetensors file"):
        nimblert.load(stripped, weights={})  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen: not installed")
def test_signature_of_a_stripped_plan_covers_its_weights(stripped: Path) -> None:
    """The weights that were verified are those that are used: a later write to their file does not reach them."""
    pytest.importorskip("cryptography", reason="needs cryptography: not installed")
    key = stripped.with_name("key")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signing.sign(stripped, key, f"{stripped}.sig")
    weights, x = stripped.with_name("w.safetensors"), drawn(3, (2, SIZE))
    with nimblert.load(stripped, weights=weights) as model:
        expected = model(x)
    with nimblert.load(stripped, weights=weights, trusted_keys=[f"{key}.pub"]) as model:
        weights.write_bytes(bytes(weights.stat().st_size))
        np.testing.assert_array_equal(model(x), expected)
    with pytest.raises(InputError, match="is no safetensors file"):
        nimblert.load(stripped, weights=weights, trusted_keys=[f"{key}.pub"])


def test_rules_find_a_damaged_digest(stripped: Path) -> None:
    plan: Plan = read_plan(stripped)
    first, *rest = plan.weights
    damaged = replace(plan, weights=(replace(first, sha256=b"short"), *rest))
    with pytest.raises(
        nimblert.PlanInvalidError, match=r"weights\[0\].sha256: 5 bytes, expected 32, and no data beside"
    ):
        encoder.write(damaged, stripped)


def test_commands_write_and_take_weights(nimblec: CommandLine, model: Path, tmp_path: Path) -> None:
    plan, weights = tmp_path / "m.plan", tmp_path / "m.safetensors"
    made = nimblec.prints("compile", model, "-o", plan, "--target", "cpu", "--strip-weights", weights)
    assert made.endswith(f"wrote {plan}\nwrote {weights}\n")
    assert "sha256" in nimblec.prints("run", plan, "--weights", weights)
    assert "does not hold its weights: give" in nimblec.refused("run", plan)
    assert "golden: the plan is stripped: give --weights FILE" in nimblec.prints("verify", plan)
    assert "bit-exact" in nimblec.prints("verify", plan, "--weights", weights, "--against", model)
    assert "in another file" in nimblec.prints("inspect", plan)
    bill = json.loads(nimblec.prints("inspect", plan, "--sbom"))
    (data,) = (component for component in bill["components"] if component["type"] == "data")
    assert "hashes" not in data
    assert [len(tensor["hashes"][0]["content"]) for tensor in data["components"]] == [64] * 4


def test_compile_overwrites_no_other_file_by_weights(nimblec: CommandLine, model: Path, tmp_path: Path) -> None:
    plan, theirs = tmp_path / "m.plan", tmp_path / "theirs.safetensors"
    write_header({"w0": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}})(theirs)
    content = theirs.read_bytes()
    refused = nimblec.refused("compile", model, "-o", plan, "--target", "cpu", "--strip-weights", theirs)
    assert refused == f"{theirs}: exists and holds no weights of a plan: remove it, or name another file"
    for same in (plan, model):
        said = nimblec.refused("compile", model, "-o", plan, "--target", "cpu", "--strip-weights", same)
        assert "name another file" in said
    missing = tmp_path / "missing" / "w.safetensors"
    assert nimblec.refused("compile", model, "-o", plan, "--target", "cpu", "--strip-weights", missing)
    assert theirs.read_bytes() == content
    assert not plan.exists()
