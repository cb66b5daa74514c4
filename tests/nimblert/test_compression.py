"""Compressed segments: what is compressed, that it comes back, and that no file becomes more than it declares."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import plans
import pytest
import zstandard
from command_line import CommandLine
from copying import copying, drawn
from onnx import TensorProto, helper, numpy_helper

import nimblert
from nimblec.plan import encoder
from nimblert import Limits, PlanFormatError
from nimblert.check.verify import read_plan
from nimblert.plan import Memcpy, Plan, Pointer, Region, Weight

pytest_plugins = ("gpu_memory",)

NBYTES = 1 << 16


def weighted(plan: Plan, contents: bytes) -> Plan:
    """The plan with one weight and one state of these contents."""
    held = Weight(name="w", dtype="uint8", shape=(len(contents),), offset=0, data=memoryview(contents))
    nbytes = len(contents)
    return replace(plan, weights=(held,), weights_nbytes=nbytes, state=(replace(held),), state_nbytes=nbytes)


def test_state_and_code_are_compressed_and_weights_if_asked(put: object, tmp_path: Path) -> None:
    del put
    path = tmp_path / "model.plan"
    plan = copying((2, 3), (0, 1))
    for contents, options, saved in [
        (bytes(NBYTES), {}, 1),
        (bytes(NBYTES), {"compress_weights": True}, 2),
        (np.random.default_rng(0).bytes(NBYTES), {"compress_weights": True}, 0),
        (bytes(4096), {"compress_weights": True}, 0),
    ]:
        made = weighted(plan, contents)
        encoder.write(made, path, **options)
        found = read_plan(path)
        assert found == made
        assert found.saved_nbytes // (NBYTES - 100) == saved
    encoded = encoder.encode(plans.cuda_plan())
    assert [content.nbytes for content in encoded.contents] < [m.code.nbytes for m in plans.cuda_plan().modules]


def test_compressed_state_is_what_a_run_reads(put: object, tmp_path: Path) -> None:
    del put
    plan = copying((64, 64), (0, 1))
    (program,) = plan.programs
    (y,) = program.outputs
    copy = Memcpy(dst=y.pointer, src=Pointer(region=Region.STATE), nbytes=y.span_nbytes, stream=0, op=0)
    plan = replace(plan, programs=(replace(program, commands=(copy,), arena_nbytes=0),))
    state = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) // 16
    encoder.write(weighted(plan, state.tobytes()), tmp_path / "model.plan")
    with nimblert.load(tmp_path / "model.plan") as model:
        assert model.plan.saved_nbytes > 0
        np.testing.assert_array_equal(model(drawn(0, (64, 64))), state)


def test_compile_compresses_weights_if_asked(nimblec: CommandLine, tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (64, 64)) for name in "xy")
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    weight = numpy_helper.from_array(np.eye(64, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "add", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx")
    plan, options = tmp_path / "m.plan", ("--target", "cpu", "--no-plan-cache", "--compress-weights")
    nimblec.prints("compile", tmp_path / "m.onnx", "-o", plan, *options)
    assert read_plan(plan).saved_nbytes > 64 * 64 * 3
    with nimblert.load(plan) as loaded:
        np.testing.assert_array_equal(loaded(np.zeros((64, 64), np.float32)), np.eye(64))
    stripped = ("--strip-weights", tmp_path / "w.safetensors")
    assert "cannot be used" in nimblec.refused("compile", tmp_path / "m.onnx", "-o", plan, *options, *stripped)


def lying(declared: int) -> bytes:
    """A frame of a mebibyte of zeros whose header declares another size."""
    made = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    assert made[4] >> 6 == 2  # four bytes of size follow the descriptor
    made[4] |= 0xC0  # eight bytes
    made[5:9] = struct.pack("<Q", declared)
    return bytes(made)


WHOLE = zstandard.ZstdCompressor().compress(bytes(5004))


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (zstandard.ZstdCompressor().compress(bytes(5005)), "compressed segment of 5005 bytes, declared as 5004"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(5004)), "segment of -1 bytes, declared as"),
        (lying(5004), "compressed segment is damaged: "),
        (lying(1 << 50), "compressed segment of 1125899906842624 bytes, declared as 5004"),
        (WHOLE[:-4], "compressed segment is damaged: "),
        (WHOLE[:3], "compressed segment is damaged: "),
        (WHOLE + b"more", "compressed segment is damaged: "),
        (WHOLE + WHOLE, "compressed segment is damaged: "),
        (b"not a frame of Zstandard", "compressed segment is damaged: "),
        (b"", "compressed segment is damaged: "),
    ],
)
def test_damaged_segments_are_refused(packed: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second module of the plan is 5,004 bytes."""
    monkeypatch.setattr(encoder, "_packed", lambda plan, **_: {id(plan.modules[1]): memoryview(packed)})
    file = encoder.encode_file(plans.cuda_plan())
    with pytest.raises(PlanFormatError, match=message) as caught:
        read_plan(file)
    assert "\n" not in str(caught.value)


def test_decompression_ends_at_the_limit() -> None:
    """A hundred segments of 64 MiB each are few bytes in the file."""
    plan = plans.cuda_plan()
    plan = replace(plan, modules=(replace(plan.modules[0], code=memoryview(bytes(64 << 20))),) * 100)
    file = encoder.encode_file(plan)
    assert len(file) < 1 << 20
    sentence = "unpacked_nbytes: compressed segments are at least 134217728 bytes, the limit is 100000000"
    with pytest.raises(PlanFormatError, match=sentence):
        read_plan(file, limits=Limits(unpacked_nbytes=100_000_000))
    with pytest.raises(PlanFormatError, match=sentence):
        nimblert.load(file, limits=Limits(unpacked_nbytes=100_000_000))
