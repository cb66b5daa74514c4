"""What the samples for servers share: rows that run together, and the protocol's bodies."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import oip
import onnx.parser
import pytest
from rows import Arrays, Batches, Probe, Rows, served_programs
from subprocesses import ROOT

import nimblec
import nimblert
from nimblert.plan import Fit, Plan, Weight

DIGITS = (0, 3, 7, 9)
IMAGES = np.concatenate([np.load(ROOT / "samples" / f"digit_{digit}.npy") for digit in DIGITS])


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = ROOT / "samples" / "digits_batch.onnx"
    return nimblec.compile(model, dims={"batch": (2, 4)}, target="cpu", plan_cache=None)


@pytest.fixture(scope="module")
def model(plan: Plan) -> Iterator[nimblert.Executable]:
    with nimblert.load(plan) as executable:
        yield executable


@pytest.fixture(scope="module")
def rows(model: nimblert.Executable) -> Rows:
    return Rows(model)


def test_any_number_of_rows_runs(rows: Rows) -> None:
    assert rows.batch == 4
    for count in (1, 2, 3, 4):
        assert rows.run({"image": IMAGES[:count]})["digit"].tolist() == list(DIGITS[:count])
    many = np.tile(IMAGES, (3, 1, 1, 1))[:11]
    assert rows.run({"image": many})["digit"].tolist() == list(DIGITS * 3)[:11]


def test_a_plan_of_one_size_runs_each_call_alone() -> None:
    plan = nimblec.compile(ROOT / "samples" / "digits.onnx", target="cpu", plan_cache=None)
    with nimblert.load(plan) as model:
        rows = Rows(model)
        assert rows.batch == 1
        assert asyncio.run(together(rows, [IMAGES[:1], IMAGES[1:2]])) == [[0], [3]]


@pytest.mark.parametrize("fits", [(), (Fit.PADDED,)])
def test_dependent_rows_run_alone(plan: Plan, fits: tuple[Fit, ...]) -> None:
    programs = tuple(replace(program, fits=fits) for program in plan.programs)
    with nimblert.load(replace(plan, programs=programs)) as model:
        rows = Rows(model)
        assert rows.batch == 0
        assert asyncio.run(together(rows, [IMAGES[:2], IMAGES[2:], IMAGES])) == [[0, 3], [7, 9], list(DIGITS)]


def test_a_plan_without_rows_is_refused(plan: Plan) -> None:
    def flat(tensor: nimblert.plan.Tensor) -> nimblert.plan.Tensor:
        return replace(tensor, shape=(), strides=())

    program = plan.programs[0]
    odd = replace(program, outputs=tuple(map(flat, program.outputs)))

    with pytest.raises(nimblert.InputError, match="expected a batch as the first dimension of every input and output"):
        served_programs(replace(plan, programs=(odd,)))


@pytest.mark.parametrize(("name", "is_refused"), [("count", True), ("", False)])
def test_a_plan_with_state_is_refused(plan: Plan, name: str, is_refused: bool) -> None:
    state = Weight(name=name, dtype="float32", shape=(4,), offset=0, data=memoryview(bytes(16)))
    kept = replace(plan, state_nbytes=16, state=(state,))
    refusal = pytest.raises(nimblert.InputError, match="x: has state, which the calls of all clients would share")
    with refusal if is_refused else nullcontext():
        served_programs(kept, "x")


async def together(rows: Rows, images: list[np.ndarray]) -> list[list[int]]:
    """Return the digits in these images, each array a call, at the same time."""
    batches = Batches(rows, 0.05)
    found = await asyncio.gather(*(batches.run({"image": image}) for image in images))
    return [outputs["digit"].tolist() for outputs in found]


def test_calls_of_one_time_run_together(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = Rows.run

    def noted(self: Rows, arrays: Arrays) -> Arrays:
        sizes.append(len(arrays["image"]))
        return run(self, arrays)

    monkeypatch.setattr(Rows, "run", noted)
    images = [IMAGES[:1], IMAGES[1:3], IMAGES[3:], IMAGES[:3], np.concatenate([IMAGES, IMAGES])]
    assert asyncio.run(together(rows, images)) == [[0], [3, 7], [9], [0, 3, 7], [*DIGITS, *DIGITS]]
    assert sizes == [4, 3, 8]


@pytest.mark.parametrize("failing", ["rows.Rows.run", "rows.joined"])
def test_batch_failure_reaches_each_call(rows: Rows, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    async def calls() -> list[object]:
        batches = Batches(rows, 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(failing, lambda *_: 1 / 0)
            calls = (batches.run({"image": IMAGES[:1]}) for _ in range(3))
            failed = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
        return [*map(type, failed), (await batches.run({"image": IMAGES}))["digit"].tolist()]

    assert asyncio.run(calls()) == [ZeroDivisionError] * 3 + [list(DIGITS)]


@pytest.fixture(scope="module")
def lookup() -> Iterator[Rows]:
    """Yield rows of a plan that sums two rows of a table of 100, whose indices callers give."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (int64[batch, 2] ids) => (float[batch, 1] y)
    <float[1] start = {0}, int64[2] shape = {100, 1}, int64[1] axis = {1}>
    { table = Expand(start, shape) rows = Gather(table, ids) y = ReduceSum<keepdims = 0>(rows, axis) }"""
    model = onnx.parser.parse_model(text)
    plan = nimblec.compile(model, dims={"batch": (1, 2, 4)}, target="cpu", plan_cache=None)
    with nimblert.load(plan) as executable:
        yield Rows(executable)


def test_batch_with_refused_values_fails_only_their_call(lookup: Rows) -> None:
    """An index out of range of one client fails in ONNX Runtime, as late as the run of the batch."""
    assert lookup.batch == 4

    async def calls() -> list[object]:
        batches = Batches(lookup, 0.05)
        ids = (np.full((1, 2), 1000 if number == 2 else number) for number in range(4))
        return await asyncio.gather(*(batches.run({"ids": array}) for array in ids), return_exceptions=True)

    found = asyncio.run(calls())
    assert [type(outcome) for outcome in found] == [dict, dict, nimblert.InputError, dict]
    outcomes = lookup.run_each([{"ids": np.full((1, 2), 1000)}, {"ids": np.zeros((2, 2), np.int64)}])
    assert isinstance(outcomes[0], nimblert.InputError)
    assert outcomes[1]["y"].shape == (2, 1)


def test_a_call_that_is_given_up_leaves_the_others_their_answers(rows: Rows) -> None:
    async def calls() -> list[int]:
        batches = Batches(rows, 0.05)
        given_up, kept = (asyncio.create_task(batches.run({"image": IMAGES[i : i + 1]})) for i in (0, 1))
        await asyncio.sleep(0.01)
        given_up.cancel()
        return (await kept)["digit"].tolist()

    assert asyncio.run(calls()) == [3]


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"picture": IMAGES}, r"inputs: \['picture'\], expected \['image'\]"),
        ({"image": IMAGES[0]}, r"input 'image': shape \(1, 8, 8\), expected \(rows, 1, 8, 8\)"),
        ({"image": np.float32(1)}, r"input 'image': shape \(\), expected \(rows, 1, 8, 8\)"),
        ({"image": IMAGES.astype(np.float64)}, "input 'image': dtype float64, expected float32"),
        ({"image": IMAGES[:0]}, r"inputs: \[0\] rows, expected as many of each, and one at least"),
    ],
)
def test_what_is_no_call(rows: Rows, arrays: Arrays, sentence: str) -> None:
    with pytest.raises(nimblert.InputError, match=sentence):
        rows.check(arrays)


# --- health


@pytest.mark.parametrize(("change", "is_healthy"), [(0.0, True), (1e-5, True), (1e-3, False)])
def test_outputs_of_a_healthy_plan_differ_by_rounding_alone(
    model: nimblert.Executable, monkeypatch: pytest.MonkeyPatch, change: float, *, is_healthy: bool
) -> None:
    probe = Probe(model)
    first = model.run

    def run(inputs: Arrays) -> Arrays:
        outputs = first(inputs)
        return {**outputs, "probabilities": outputs["probabilities"] * np.float32(1 + change)}

    monkeypatch.setattr(model, "run", run)
    refusal = pytest.raises(RuntimeError, match="output 'probabilities' is not what it was at load")
    with nullcontext() if is_healthy else refusal:
        probe.check()


def test_run_difference_is_in_golden_record(plan: Plan) -> None:
    programs = (replace(p, golden=p.golden and replace(p.golden, tolerance=0.5)) for p in plan.programs)
    with nimblert.load(replace(plan, programs=tuple(programs))) as model:
        assert Probe(model)._tolerance == 0.5


def test_every_value_of_an_output_is_probed(model: nimblert.Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    probe, first = Probe(model), model.run

    def run(inputs: Arrays) -> Arrays:
        outputs = first(inputs)
        wrong = np.tile(outputs["probabilities"], (1000, 1))
        if len(probe._expected["probabilities"]) == len(wrong):
            wrong[500, 1] = np.nan
        return {**outputs, "probabilities": wrong}

    monkeypatch.setattr(model, "run", run)
    probe._expected = run(probe._inputs)
    with pytest.raises(RuntimeError, match="output 'probabilities' is not what it was at load"):
        probe.check()


# --- the protocol


TENSOR = {"name": "image", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}
BINARY = {"name": "image", "shape": [2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
FOUR = np.arange(1, 5, dtype=np.float32).reshape(2, 2)


def body(*tensors: object, **more: object) -> bytes:
    return json.dumps({"inputs": tensors, **more}).encode()


MASK = body({"name": "mask", "shape": [4], "datatype": "BOOL", "parameters": {"binary_data_size": 4}})


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]])
def test_tensors_in_the_json(data: list[object]) -> None:
    found = oip.read_request(body({**TENSOR, "data": data}, id="a"), None)
    np.testing.assert_array_equal(found.arrays["image"], FOUR, strict=True)
    assert (found.id, found.binary, found.binary_else) == ("a", {}, False)


def test_null_is_what_was_left_out() -> None:
    found = oip.read_request(body({**TENSOR, "parameters": None}, id=None, parameters=None, outputs=None), None)
    assert (found.id, found.binary, found.binary_else) == ("", {}, False)


def test_tensors_behind_the_json() -> None:
    second = {"name": "flags", "shape": [3], "datatype": "BOOL", "parameters": {"binary_data_size": 3}}
    header = body(BINARY, second, parameters={"binary_data_output": True})
    found = oip.read_request(header + FOUR.tobytes() + b"\1\0\1", str(len(header)))
    np.testing.assert_array_equal(found.arrays["image"], FOUR, strict=True)
    np.testing.assert_array_equal(found.arrays["flags"], [True, False, True], strict=True)
    assert found.binary_else


@pytest.mark.parametrize(
    ("content", "length", "sentence"),
    [
        (b"{", None, "not one of the Open Inference Protocol"),
        (b"[]", None, "not one of the Open Inference Protocol"),
        (b"{}", None, "the request has no 'inputs'"),
        (body({**TENSOR, "shape": [-1, 4]}), None, r"shape \(-1, 4\), expected whole numbers from 0"),
        (body({**TENSOR, "shape": [1] * 100_000}), None, "input 'image': 100000 sizes in its shape, expected"),
        (body({**TENSOR, "shape": [2.5, 2]}), None, r"shape \(2\.5, 2\), expected whole numbers from 0"),
        (body({**TENSOR, "shape": "22"}), None, r"shape \('2', '2'\), expected whole numbers from 0"),
        (body(TENSOR, TENSOR), None, "input 'image' was given twice: give it once"),
        (body(TENSOR) + b"abc", str(len(body(TENSOR))), "3 bytes follow those of the inputs, expected none"),
        (body({**TENSOR, "shape": [3, 2]}), None, r"4 values, its shape \(3, 2\) has 6"),
        (body({**TENSOR, "data": [[1], [2, 3]]}), None, "not one of the Open Inference Protocol"),
        (body({**TENSOR, "datatype": "BYTES"}), None, "datatype 'BYTES', expected one of"),
        (MASK + bytes([0, 2, 1, 0]), str(len(MASK)), "input 'mask': bytes other than 0 and 1 are no BOOL"),
        (body({**TENSOR, "name": ["a"]}), None, "not one of the Open Inference Protocol"),
        (body(BINARY), None, "16 of 0 bytes, expected 16 bytes"),
        (body({**BINARY, "parameters": {"binary_data_size": 12}}) + bytes(12), "x", "not one of the Open"),
        (body(TENSOR), "-3", f"Inference-Header-Content-Length: -3, expected 0 to {len(body(TENSOR))}, the length"),
        (body(TENSOR) + b"abc", "-3", "Inference-Header-Content-Length: -3, expected 0 to"),
        (body(TENSOR), "1000", "Inference-Header-Content-Length: 1000, expected 0 to"),
        (body({**TENSOR, "datatype": "INT32", "data": [1, 2, 3, 1.9]}), None, r"input 'image': 1\.9 is no INT32$"),
        (body({**TENSOR, "datatype": "UINT8", "data": [1, 2, 3, True]}), None, "input 'image': true is no UINT8$"),
        (body({**TENSOR, "datatype": "BOOL", "data": ["false"] * 4}), None, "input 'image': \"false\" is no BOOL$"),
        (body({**TENSOR, "datatype": "BOOL", "data": [True, 0] * 2}), None, "input 'image': 0 is no BOOL$"),
        (body({**TENSOR, "data": [1, 2, 3, "1.5"]}), None, "input 'image': \"1.5\" is no FP32$"),
        (body({**TENSOR, "data": [1, 2, 3, None]}), None, "input 'image': null is no FP32$"),
        (body({**TENSOR, "datatype": "UINT8", "data": [1, 2, 3, 300]}), None, "not one of the Open Inference Protocol"),
        (b"[" * 100_000, None, "not one of the Open Inference Protocol"),
    ],
)
def test_what_is_no_request(content: bytes, length: str | None, sentence: str) -> None:
    with pytest.raises(oip.ProtocolError, match=sentence):
        oip.read_request(content, length)


@pytest.mark.parametrize("name", ["image", "none"])
def test_answers_have_the_outputs_that_were_asked_for(name: str) -> None:
    arrays = {"image": FOUR, "flags": np.array([True, False])}
    everything = oip.read_request(body(TENSOR), None)
    content, headers = oip.write_response("m", everything, arrays)
    assert oip.HEADER_LENGTH not in headers
    assert [output["data"] for output in json.loads(content)["outputs"]] == [[1, 2, 3, 4], [True, False]]
    one = oip.read_request(body(TENSOR, outputs=[{"name": name, "parameters": {"binary_data": True}}]), None)
    if name == "none":
        with pytest.raises(oip.ProtocolError, match=r"output 'none': not found, the model has \['image', 'flags'\]"):
            oip.write_response("m", one, arrays)
        return
    content, headers = oip.write_response("m", one, arrays)
    length = int(headers[oip.HEADER_LENGTH])
    (output,) = json.loads(content[:length])["outputs"]
    assert (output["name"], output["shape"], output["parameters"]) == ("image", [2, 2], {"binary_data_size": 16})
    assert content[length:] == FOUR.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_json_cannot_hold_is_asked_for_as_binary_data(value: float) -> None:
    arrays = {"image": np.array([1, value], np.float32)}
    with pytest.raises(oip.ProtocolError, match=r"output 'image': holds NaN or an infinity, .*: ask for binary data"):
        oip.write_response("m", oip.read_request(body(TENSOR), None), arrays)
    binary = oip.read_request(body(TENSOR, parameters={"binary_data_output": True}), None)
    assert oip.write_response("m", binary, arrays)[0].endswith(arrays["image"].tobytes())
