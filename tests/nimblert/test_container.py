"""Writing and reading plan files: whole or not at all, and one clear sentence for each kind of damage."""

import hashlib
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import plans
import pytest

from nimblec.plan import encoder
from nimblert.check.verify import read_plan
from nimblert.errors import InputError, NimbleError, PlanError, PlanFormatError, PlanInvalidError
from nimblert.plan import Plan, Weight, container

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.plan"
    encoder.write(plans.cuda_plan(), path)
    return path


def refusal(path: Path) -> str:
    """Return the message with which reading ``path`` is refused, without the path before it."""
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("plan", [plans.cuda_plan(), plans.cpu_plan()], ids=["cuda", "cpu"])
def test_read_gives_what_was_written(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    encoder.write(plan, path)
    assert read_plan(path) == plan
    assert read_plan(str(path), check_digest=False) == plan
    assert path.read_bytes() == encoder.encode_file(plan)
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_can_be_written_over_the_file_it_was_read_from(plan_path: Path) -> None:
    plan = read_plan(plan_path)
    encoder.write(plan, plan_path)
    assert read_plan(plan_path) == plan == plans.cuda_plan()


def test_plan_saves_the_bytes_that_it_was_read_from(tmp_path: Path) -> None:
    """An old plan stays as old; the file may be the one that the plan is mapped from."""
    old = (DATA / "plan-1.0.plan").read_bytes()
    path = tmp_path / "model.plan"
    for source in (DATA / "plan-1.0.plan", str(path), old):
        read_plan(source).save(path)
        assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_plan_made_or_changed_in_memory_is_not_saved(plan_path: Path) -> None:
    before = plan_path.read_bytes()
    for plan in (plans.cpu_plan(), replace(read_plan(plan_path), producer="another")):
        with pytest.raises(InputError, match=r"no file holds it: nimblec\.plan\.encoder\.write\(plan, path\) makes"):
            plan.save(plan_path)
        with pytest.raises(InputError, match="the plan was made or changed in memory"):
            pickle.dumps(plan)
    assert plan_path.read_bytes() == before


def test_weights_of_any_shape_and_none(tmp_path: Path) -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    empty = np.zeros((0, 4), dtype=np.float32)
    weights = (
        Weight(name="empty", dtype="float32", shape=(0, 4), offset=0, data=memoryview(empty)),
        Weight(name="matrix", dtype="float32", shape=(3, 4), offset=256, data=memoryview(matrix)),
    )
    path = tmp_path / "model.plan"
    encoder.write(replace(plans.cuda_plan(), weights=weights), path)
    read = read_plan(path)
    assert [weight.data.nbytes for weight in read.weights] == [0, 48]
    assert np.array_equal(np.frombuffer(read.weights[1].data, np.float32).reshape(3, 4), matrix)


def test_code_and_weights_cannot_be_written_through_the_map(plan_path: Path) -> None:
    plan = read_plan(plan_path)
    assert plan.weights[0].data.readonly
    assert plan.modules[0].code.readonly


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, expected a plan file"),
        (b"hi", "is not a plan file"),
        (b"some text that is no plan at all", "is not a plan file"),
        (b"PK\x03\x04" + bytes(100), "it looks like a zip archive"),
        (b"\x08\x08\x12\x07pytorch" + bytes(100), "it looks like an ONNX model: compile it first"),
        (b"\x7fELF" + bytes(100), "it looks like an ELF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it looks like a Git LFS pointer: run"),
        (bytes(4) + b"NPLN" + bytes(100), "the end of its 108 bytes is missing or damaged"),
    ],
)
def test_not_a_plan(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert message in refusal(path)


@pytest.mark.parametrize("missing", [1, 63, 64, 65, 5000, 12000])
def test_cut_short(missing: int, plan_path: Path) -> None:
    whole = plan_path.read_bytes()
    plan_path.write_bytes(whole[:-missing])
    actual = len(whole) - missing
    assert refusal(plan_path) == f"is cut short: {actual} bytes, expected {len(whole)}; copy it again"


@pytest.mark.parametrize("position", [40, 9000, -70, -40, -1])
def test_altered(position: int, plan_path: Path) -> None:
    content = bytearray(plan_path.read_bytes())
    content[position] ^= 1
    plan_path.write_bytes(content)
    assert refusal(plan_path).startswith("was altered after it was written (SHA-256 differs)")


def test_container_refuses_contradiction(plan_path: Path) -> None:
    bad = replace(plans.cuda_plan(), kernels=())
    before = plan_path.read_bytes()
    with pytest.raises(PlanInvalidError, match=r"commands\[1\]\.kernel: 0 is out of range"):
        encoder.write(bad, plan_path)
    assert plan_path.read_bytes() == before
    plan_path.write_bytes(encoder.encode_file(bad))
    with pytest.raises(PlanInvalidError, match=r"commands\[1\]\.kernel: 0 is out of range") as caught:
        read_plan(plan_path)
    assert len(caught.value.problems) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_writing_to_a_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(NimbleError, match="cannot be written: Permission denied"):
        encoder.write(plans.cpu_plan(), tmp_path / "model.plan")


def test_only_the_magic_word_is_damaged(plan_path: Path) -> None:
    content = bytearray(plan_path.read_bytes())
    content[-64] ^= 1
    content[-32:] = hashlib.sha256(content[:-32]).digest()
    plan_path.write_bytes(content)
    assert refusal(plan_path) == f"the end of its {len(content)} bytes is missing or damaged; copy it again"


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a plan that is written with digests of its segments, as large ones are."""
    monkeypatch.setattr(encoder, "_LARGE_NBYTES", 1)
    image = memoryview(encoder.encode_file(plans.cuda_plan()))
    plan = container.decoded(image, "plan")
    assert len(plan.digests) == 32 * (1 + len(plan.modules) + len(plan.weights) + len(plan.state))
    return plan


def test_digests_of_segments_notice_each_altered_byte(large: Plan) -> None:
    image = large.stored()
    container.verify_digest(image, "plan", large)
    unnoticed = []
    for position in range(len(image)):
        altered = memoryview(bytes(image[:position]) + bytes([image[position] ^ 1]) + bytes(image[position + 1 :]))
        try:
            container.check_frame(altered, "plan")
            container.verify_digest(altered, "plan", container.decoded(altered, "plan"))
        except PlanFormatError:
            continue
        unnoticed.append(len(image) - position)
    assert unnoticed == [*range(40, 0, -1)], "only the zeros of the trailer, and its digest of the whole file"


def test_file_with_digests_has_one_of_the_whole_too(large: Plan) -> None:
    container.verify_digest(large.stored(), "plan")
    assert encoder.encode_file(large) == large.stored()


def test_small_file_has_no_digests_of_segments() -> None:
    assert container.decoded(memoryview(encoder.encode_file(plans.cuda_plan())), "plan").digests == b""
