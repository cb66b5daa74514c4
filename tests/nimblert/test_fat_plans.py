"""Fat plans: merging, choosing a part, signatures, and files that lie about their parts."""

import json
import pickle
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
from copying import copying, drawn, on_host
from onnx import TensorProto, helper, numpy_helper

import nimblec
import nimblert
from nimblec.plan import encoder, merging, signing
from nimblert import DeviceMismatchError, InputError, PlanError
from nimblert.check.verify import read_plan
from nimblert.cpu.host_memory import HostWeights
from nimblert.cuda import driver
from nimblert.plan import Memcpy, Part, Plan, Pointer, Region, Target, Weight, parts

pytest_plugins = ("gpu_memory",)
pytestmark = on_host

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"

SHAPE = (64, 64)
NBYTES = 64 * 64 * 4
WEIGHT = drawn(1, SHAPE)
X = np.zeros(SHAPE, np.float32)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CPU plan of y = x + w."""
    folder = tmp_path_factory.mktemp("cpu")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in "xy")
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "add", [x], [y], [numpy_helper.from_array(WEIGHT, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), folder / "m.onnx")
    nimblec.compile(folder / "m.onnx", target="cpu", plan_cache=None).save(folder / "cpu.plan")
    return folder / "cpu.plan"


def cuda_plan(capability: tuple[int, int] = (9, 0), content: np.ndarray = WEIGHT, **device: object) -> Plan:
    """A plan of the same interface, whose output is its weight; of one more weight for each capability."""
    plan = copying(SHAPE, (0, 1))
    (program,) = plan.programs
    copy = Memcpy(dst=program.outputs[0].pointer, src=Pointer(region=Region.WEIGHTS), nbytes=NBYTES, stream=0, op=0)
    held = Weight(name="w", dtype="float32", shape=SHAPE, offset=0, data=memoryview(content.tobytes()))
    own = replace(held, name="own", offset=NBYTES, data=memoryview(drawn(sum(capability), SHAPE).tobytes()))
    return replace(
        plan,
        device=replace(plan.device, compute_capability=capability, **device),
        weights=(held, own),
        weights_nbytes=2 * NBYTES,
        programs=(replace(program, commands=(copy,), arena_nbytes=0, golden=None),),
    )


@pytest.fixture
def sources(put: object, compiled: Path, tmp_path: Path) -> list[Path]:
    """The CPU plan, and plans for GPUs of capabilities 8.0 and 9.0, which is what the fake driver has."""
    del put
    for name, capability in (("a100", (8, 0)), ("h100", (9, 0))):
        encoder.write(cuda_plan(capability), tmp_path / f"{name}.plan")
    return [compiled, tmp_path / "a100.plan", tmp_path / "h100.plan"]


@pytest.fixture
def fat(sources: list[Path], tmp_path: Path) -> Path:
    merging.merge(sources, tmp_path / "fat.plan")
    return tmp_path / "fat.plan"


@pytest.fixture
def no_driver(fat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver on the machine, once the plans are made."""
    del fat

    def initialise() -> None:
        raise DeviceMismatchError("this plan needs a GPU, and this machine has no NVIDIA driver")

    monkeypatch.setattr(driver, "initialise", initialise)


def test_load_takes_the_part_of_this_gpu(fat: Path) -> None:
    with nimblert.load(fat) as model:
        assert model.plan.device.compute_capability == (9, 0)
        np.testing.assert_array_equal(model(X), WEIGHT)
        assert model.choice == (
            "part 3 of 3, for compute capability 9.0 (host 0), runs here; part 2 of 3, for compute capability 8.0"
            " (host 0), does not: the plan was made for compute capability 8.0 (host 0), this machine has 9.0 (host 0):"
            " compile it on a GPU of this generation"
        )
    with nimblert.load(fat, device=1) as model:
        assert (model.device, model.plan.target) == (1, Target.CUDA)
    with nimblert.load_pool(fat) as pool:
        assert [(one.device, one.plan.target) for one in pool.executables] == [(0, Target.CUDA), (1, Target.CUDA)]


@pytest.mark.usefixtures("no_driver")
def test_load_takes_the_part_of_the_cpu_without_a_gpu(fat: Path) -> None:
    plan = read_plan(fat, fat=True)
    for source in (fat, fat.read_bytes(), plan, pickle.loads(pickle.dumps(plan))):  # noqa: S301 - made here
        with nimblert.load(source) as model:
            assert model.choice.startswith("part 1 of 3, for the CPU, runs here; part 2 of 3, for compute capability")
            np.testing.assert_array_equal(model(X), WEIGHT)
    with nimblert.load_pool(fat) as pool:
        assert [one.plan.target for one in pool.executables] == [Target.CPU]
    with pytest.raises(DeviceMismatchError, match=r"no part of the fat plan runs here: part 2 of 3, .*; part 3 of 3"):
        nimblert.load(fat, target="cuda")


def test_target_forces_a_part(fat: Path, compiled: Path) -> None:
    with nimblert.load(fat, target="cpu") as model:
        assert model.plan.target is Target.CPU
        np.testing.assert_array_equal(model(X), WEIGHT)
    with nimblert.load(compiled, target="cpu") as model:
        assert model.choice == ""
    for source in (compiled, read_plan(compiled)):
        with pytest.raises(InputError, match="target: got 'cuda', and the plan is for cpu alone"):
            nimblert.load(source, target="cuda")
    with pytest.raises(InputError, match=r"target: got 'tpu', expected one of \['cuda', 'cpu'\]"):
        nimblert.load(fat, target="tpu")


def test_shared_weights_are_stored_once_and_mapped(fat: Path, sources: list[Path]) -> None:
    plan = read_plan(fat, fat=True)
    assert [weight.data for weight in plan.weights] == [memoryview(WEIGHT.tobytes())]
    assert fat.stat().st_size < sum(path.stat().st_size for path in sources) - NBYTES
    part = parts.filled(parts.read(plan, 0, "fat"), plan)
    assert part == read_plan(sources[0])
    array, _ = HostWeights(part).find(0)
    assert np.shares_memory(array, np.frombuffer(plan.image, np.uint8))
    again = fat.with_name("again.plan")
    merging.merge(sources, again)
    assert again.read_bytes() == fat.read_bytes()


def test_plans_without_equal_weights_stay_as_they_are(sources: list[Path], tmp_path: Path) -> None:
    encoder.write(cuda_plan(content=drawn(7, SHAPE)), sources[2])
    fat = merging.merge([sources[0], sources[2]], tmp_path / "fat.plan")
    assert [part.file for part in fat.parts] == [path.read_bytes() for path in (sources[0], sources[2])]


def renamed(plan: Plan, **changes: object) -> Plan:
    """The plan with changes to its output."""
    (program,) = plan.programs
    return replace(plan, programs=(replace(program, outputs=(replace(program.outputs[0], **changes),)),))


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (lambda: renamed(cuda_plan(), name="z"), "in program 'main': output 0: y: float32 64x64, and z: float32 64x64"),
        (lambda: renamed(cuda_plan(), dtype="int32"), "output 0: y: float32 64x64, and y: int32 64x64"),
        (lambda: renamed(cuda_plan(), shape=(32, 64)), "output 0: y: float32 64x64, and y: float32 32x64"),
        (
            lambda: replace(cuda_plan(), state=(cuda_plan().weights[0],), state_nbytes=NBYTES),
            "differ in state 'w': none, and float32 64x64",
        ),
        (lambda: cuda_plan((8, 0)), r"a100.plan and \S+other.plan are both for compute capability 8.0"),
        (
            lambda: replace(cuda_plan(), programs=(replace(cuda_plan().programs[0], profile=(("batch", 64),)),)),
            r"differ in program 'main': sizes: one, and batch=64 \(exact\)",
        ),
    ],
)
def test_merge_refuses_other_interfaces(
    other: Callable[[], Plan], sentence: str, sources: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "other.plan"
    encoder.write(other(), path)
    with pytest.raises(InputError, match=sentence) as caught:
        merging.merge([*sources[:2], path], tmp_path / "fat.plan")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "fat.plan").exists()


def test_merge_refuses_fat_and_single_plans(nimblec: CommandLine, fat: Path, compiled: Path) -> None:
    output = fat.with_name("out.plan")
    assert "is a fat plan, of 3 parts" in nimblec.refused("merge", compiled, fat, "-o", output)
    assert "is the only plan, expected two" in nimblec.refused("merge", compiled, "-o", output)
    assert "is one of the plans: name another" in nimblec.refused("merge", compiled, fat, "-o", fat)
    assert not output.exists()
    for command in ("explain", "diff"):
        assert "is a fat plan, of 3 parts: give one" in nimblec.refused(command, *[fat] * (1 + (command == "diff")))


def test_commands_take_fat_plans(nimblec: CommandLine, fat: Path, sources: list[Path]) -> None:
    made = nimblec.prints("merge", *sources, "-o", fat)
    assert f"part 2: {sources[1]}, for compute capability 8.0 (host 0)" in made
    assert "16.4 kB are shared weights" in made
    shown = nimblec.prints("inspect", fat)
    assert "part 3 of 3, for compute capability 9.0 (host 0), runs here" in shown
    assert [part["target"] for part in json.loads(nimblec.prints("inspect", fat, "--json"))["parts"]] == [
        "cpu", "cuda", "cuda"
    ]  # fmt: skip
    assert "of which only the parts are shown" in nimblec.refused("inspect", fat, "--sbom")
    assert "part 3 of 3" in nimblec.prints("run", fat)
    verified = nimblec.prints("verify", fat)
    assert "ok       part 1, golden: output 'y': bit-exact" in verified
    assert "ok       part 3, hazards" in verified


def test_check_device_names_what_is_missing(
    nimblec: CommandLine, fat: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "part 1, for the CPU: nothing is missing" in nimblec.prints("check-device", fat)
    assert nimblec.prints("check-device", sources[2]) == f"nothing is missing\n{sources[2]} runs here\n"
    done = nimblec("check-device", sources[1], "--json")
    assert done.status == 1
    assert json.loads(done.out)["parts"][0]["lacks"][0].startswith("the plan was made for compute capability 8.0")
    large = replace(cuda_plan(), weights_nbytes=1 << 40)
    encoder.write(large, sources[1])
    done = nimblec("check-device", sources[1])
    assert (done.status, "bytes of memory, and there are 1073741824" in done.out) == (1, True)
    encoder.write(cuda_plan(driver_version=13010), sources[1])
    assert "needs a driver for CUDA 13.1" in nimblec("check-device", sources[1]).out
    assert "device 7: CUDA shows 2 here" in nimblec("check-device", sources[2], "--device", 7).out
    monkeypatch.setattr("nimblert.cpu.onnx_session.nchwc_block_size", lambda: 1)
    done = nimblec("check-device", CORPUS / "seed-conv-nchwc16.plan")
    assert (done.status, "convolution layout nchwc16, this one has nchwc1" in done.out) == (1, True)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen: not installed")
def test_signature_covers_all_parts(nimblec: CommandLine, fat: Path) -> None:
    pytest.importorskip("cryptography", reason="needs cryptography: not installed")
    key = fat.with_name("key")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signing.sign(fat, key, f"{fat}.sig")
    assert "ok       signature" in nimblec.prints("verify", fat, "--trusted-key", f"{key}.pub")
    with nimblert.load(fat, trusted_keys=[f"{key}.pub"]) as model:
        np.testing.assert_array_equal(model(X), WEIGHT)
    content = bytearray(fat.read_bytes())
    content[content.index(drawn(8, SHAPE).tobytes())] ^= 1  # a weight of the part that is not taken
    fat.write_bytes(content)
    with pytest.raises(nimblert.PlanSignatureError):
        nimblert.load(fat, trusted_keys=[f"{key}.pub"])
    nimblert.load(fat).close()


def altered(fat: Plan, **changes: object) -> bytes:
    """The file of a fat plan with changes to its last part, which is the one that fits."""
    *others, last = fat.parts
    return encoder.encode_file(replace(fat, parts=(*others, replace(last, **changes))))


def misplaced(fat: Plan, offset: int, nbytes: int) -> bytes:
    """The file with another place for its last part."""
    file = encoder.encode_file(fat)
    size = fat.parts[-1].file.nbytes
    place = struct.pack("<QQ", len(file) - 64 - size, size)
    assert file.count(place) == 1
    start, count = struct.unpack("<QQ", place)
    return file.replace(place, struct.pack("<QQ", (start + offset) % 2**64, (count + nbytes) % 2**64))


def changed_weight(fat: Plan) -> bytes:
    (weight,) = fat.weights
    return encoder.encode_file(replace(fat, weights=(replace(weight, data=memoryview(bytes(NBYTES))),)))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda fat: altered(fat, file=fat.parts[2].file[:-1]), "part 3: is cut short"),
        (lambda fat: altered(fat, file=memoryview(b"")), "part 3: is not a plan file"),
        (lambda fat: altered(fat, file=memoryview(bytes(fat.parts[2].file[:-64]) + bytes(64))), "part 3: the end of"),
        (lambda fat: altered(fat, file=memoryview(encoder.encode_file(fat))), "part 3: is a fat plan itself"),
        (lambda fat: altered(fat, file=fat.parts[1].file), "part 3: is a plan for compute capability 8.0"),
        (lambda fat: misplaced(fat, -4096, 4096), "the one before it ends at byte"),
        (lambda fat: misplaced(fat, 0, 2**63), r"ends at byte \d+ of \d+"),
        (lambda fat: misplaced(fat, 2**63, 0), "the one before it ends at byte"),
        (lambda fat: misplaced(fat, 0, 64), r"trailer|the one before it ends"),
        (changed_weight, "weight 'w': the fat plan does not hold it, or it was altered"),
        (lambda fat: encoder.encode_file(replace(fat, weights=())), "weight 'w': the fat plan does not hold it"),
        (lambda fat: encoder.encode_file(replace(fat, parts=())), "parts: 0, expected 1 to 256"),
        (lambda fat: encoder.encode_file(replace(cuda_plan(), parts=fat.parts)), "and none in others"),
        (lambda fat: encoder.encode_file(replace(fat, parts=fat.parts[:1] * 257)), "parts: 257, expected 1 to 256"),
        (lambda fat: bytes(fat.image)[:-5000], "is cut short"),
    ],
)
def test_damaged_fat_plans_are_refused(damage: Callable[[Plan], bytes], sentence: str, fat: Path) -> None:
    file = damage(read_plan(fat, fat=True))
    with pytest.raises((PlanError, DeviceMismatchError), match=sentence) as caught:
        nimblert.load(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(PlanError) as caught:
        read_plan(file, fat=True)
    assert "\n" not in str(caught.value)


def test_altered_part_is_refused_when_it_is_taken(fat: Path) -> None:
    content = bytearray(fat.read_bytes())
    content[content.index(drawn(9, SHAPE).tobytes())] ^= 1
    with pytest.raises(PlanError, match=r"plan, part 3: was altered after it was written"):
        nimblert.load(bytes(content))
    nimblert.load(bytes(content), target="cpu").close()
    with pytest.raises(PlanError, match="plan: was altered after it was written"):
        read_plan(bytes(content), fat=True)


def test_rules_apply_to_each_part(fat: Path) -> None:
    plan = read_plan(fat, fat=True)
    broken = encoder.encode_file(replace(cuda_plan(), weights_nbytes=5))
    last = Part(target=Target.CUDA, device=cuda_plan().device, file=memoryview(broken))
    made = replace(plan, parts=(*plan.parts[:2], last))
    with pytest.raises(PlanError, match=r"parts\[2\].weights\[0\]: ends at 16384, outside the region"):
        encoder.write(made, fat)
