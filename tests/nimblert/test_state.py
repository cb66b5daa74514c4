"""The state of a loaded plan by name: read, written, reset, and refused in one sentence."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plans
import pytest
from kept_state import keeping

import nimblert
from nimblec.plan import encoder
from nimblert.check import verify
from nimblert.errors import InputError, PlanInvalidError
from nimblert.executable import Executable
from nimblert.plan import ITEM_NBYTES, Memcpy, Memset, Weight


@pytest.fixture
def loaded() -> Iterator[Executable]:
    with nimblert.load(encoder.encode_file(keeping()), poison=True) as executable:
        yield executable


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_state_is_a_mapping_of_arrays(loaded: Executable) -> None:
    assert isinstance(loaded.state, Mapping)
    assert list(loaded.state) == ["kept"]
    assert loaded.state.get("kept").shape == (4,)
    assert loaded.state.get("lost", 5) == 5
    assert repr(loaded.state) == "State('kept': float32 (4,))"
    kept = loaded.state["kept"]
    np.testing.assert_array_equal(kept, floats(1, 2, 3, 4), strict=True)
    kept[:] = 0  # a copy
    assert loaded(entry="read").tolist() == [1, 2, 3, 4]


def test_what_is_assigned_is_what_the_next_run_finds(loaded: Executable) -> None:
    loaded.state["kept"] = np.arange(8, dtype=np.float32)[::2]
    assert loaded(entry="read").tolist() == [0, 2, 4, 6]
    loaded.reset()
    assert loaded(entry="read").tolist() == [1, 2, 3, 4]


def scalar(dtype: str) -> Executable:
    """Return a plan with a scalar of this dtype among its state."""
    plan = keeping()
    zero = Weight(name="scalar", dtype=dtype, shape=(), offset=64, data=memoryview(bytes(ITEM_NBYTES[dtype])))
    return nimblert.load(encoder.encode_file(replace(plan, state_nbytes=128, state=(*plan.state, zero))))


FLOATS = (0.1, 3, float("inf"), np.float64(0.1), np.float32(0.1), np.array(2, "f4"))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *(("float32", value) for value in FLOATS),
        *(("int64", value) for value in (3, -(2**63))),
        *(("bool", value) for value in (True, np.bool_(False))),
    ],
)
def test_a_scalar_may_be_a_number(dtype: str, value: Any) -> None:
    with scalar(dtype) as executable:
        executable.state["scalar"] = value
        np.testing.assert_array_equal(executable.state["scalar"], np.asarray(value, dtype), strict=True)


@pytest.mark.parametrize(
    ("dtype", "value", "sentence"),
    [
        ("float32", 1e39, r"^state 'scalar': 1e\+39 is beyond the numbers of float32$"),
        ("float32", 2**2000, r"is beyond the numbers of float32$"),
        ("uint8", 256, "^state 'scalar': 256 is beyond the numbers of uint8$"),
        ("int64", -(2**63) - 1, "is beyond the numbers of int64$"),
        ("int64", 1.0, "^state 'scalar': got float, expected a numpy array"),
        ("float32", True, "^state 'scalar': got bool, expected a numpy array"),
        ("bool", 1, "^state 'scalar': got int, expected a numpy array"),
        ("bfloat16", 1.0, "^state 'scalar': got float, expected a numpy array"),
        ("float32", "1", "^state 'scalar': got str, expected a numpy array"),
    ],
)
def test_a_number_that_a_scalar_does_not_hold(dtype: str, value: Any, sentence: str) -> None:
    with scalar(dtype) as executable:
        with pytest.raises(InputError, match=sentence):
            executable.state["scalar"] = value
        assert not executable.state["scalar"].any()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("nope", floats(0), r"^state 'nope': not found, the plan has \['kept'\]$"),
        ("kept", floats(0), r"^state 'kept': shape \(1,\), expected \(4,\)$"),
        ("kept", np.zeros(4), r"^state 'kept': dtype float64, expected float32: use .astype\('float32'\)$"),
        ("kept", [0.0] * 4, r"^state 'kept': got list, expected a numpy array"),
    ],
)
def test_what_does_not_fit_is_refused(loaded: Executable, name: str, value: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        loaded.state.update({"kept": floats(9, 9, 9, 9)} | {name: value})
    assert loaded.state["kept"].tolist() == [1, 2, 3, 4]


def test_the_state_of_another_context_is_taken_or_its_own(loaded: Executable) -> None:
    with loaded.context() as context:
        context.state["kept"] = floats(9, 9, 9, 9)
        for state in (context.state, loaded.state):
            state.update(context.state)
            assert state["kept"].tolist() == [9, 9, 9, 9]


ASKING: list[Callable[[Any], object]] = [
    lambda context: context.state["kept"],
    lambda context: context.state.update({"kept": floats(0, 0, 0, 0)}),
    lambda context: context.state.load("missing.safetensors"),
    lambda context: context.reset(),
]


@pytest.mark.parametrize("ask", ASKING)
def test_the_state_of_a_closed_context(loaded: Executable, ask: Callable[[Any], object]) -> None:
    with loaded.context() as context:
        assert context.state["kept"].any()
    with pytest.raises(InputError, match=r"^this context is closed: make another one$"):
        ask(context)


@pytest.mark.parametrize("ask", ASKING)
def test_the_state_of_a_context_that_another_thread_runs(loaded: Executable, ask: Callable[[Any], object]) -> None:
    entered, done = threading.Event(), threading.Event()
    with loaded.context() as context:

        def work() -> None:
            with context.between_runs():
                entered.set()
                done.wait()

        thread = threading.Thread(target=work)
        thread.start()
        entered.wait()
        try:
            with pytest.raises(InputError, match=r"^this context is at work in another thread"):
                ask(context)
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("ask", ASKING)
def test_the_state_in_the_middle_of_a_run(loaded: Executable, ask: Callable[[Any], object]) -> None:
    steps = loaded.steps({}, entry="read")
    next(steps)
    with pytest.raises(InputError, match=r"^a run by steps\(\) is half done"):
        ask(loaded)
    steps.close()


def test_a_file_keeps_the_state(loaded: Executable, tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy", reason="needs safetensors: not installed")
    path = tmp_path / "state.safetensors"
    loaded(floats(5, 6, 7, 8), entry="write")
    loaded.state.save(path)
    assert numpy_files.load_file(path)["kept"].tolist() == [5, 6, 7, 8]
    loaded.reset()
    loaded.state.load(path)
    assert loaded(entry="read").tolist() == [5, 6, 7, 8]
    for content, sentence in (
        ({}, "lacks the state 'kept'$"),
        ({"kept": np.zeros(4)}, "^state 'kept': dtype float64, expected float32"),
        ({"kept": floats(1)}, r"^state 'kept': shape \(1,\), expected \(4,\)$"),
        ({"kept": floats(1, 1, 1, 1), "more": floats(1)}, "^state 'more': not found"),
    ):
        numpy_files.save_file(content, path)
        with pytest.raises(InputError, match=sentence):
            loaded.state.load(path)
    assert loaded.state["kept"].tolist() == [5, 6, 7, 8]


def test_files_need_a_package(loaded: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for use in (loaded.state.save, loaded.state.load):
        with pytest.raises(InputError, match=r"pip install 'nimblert\[safetensors\]'"):
            use(tmp_path / "state.safetensors")


def test_state_that_is_written_beside_who_reads_it() -> None:
    plan = keeping()
    read = plan.programs[2]
    (copy,) = read.commands
    assert isinstance(copy, Memcpy)
    write = Memset(stream=1, op=0, dst=copy.src, value=0, element_nbytes=4, count=4)
    beside = replace(read, commands=(copy, write), stream_count=2)
    with pytest.raises(PlanInvalidError, match="nothing orders their accesses to state bytes 0 to 16"):
        nimblert.load(replace(plan, programs=(beside,)))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("a", "a"), "state: two have the same name"),
        (("a", "b\n"), "state[1].name: 'b\\n' is not printable"),
        (("a", ""), "state[1].name: is empty, as only that of scratch memory of a GPU's kernels may be"),
    ],
)
def test_names_that_users_cannot_ask_for(names: tuple[str, str], sentence: str) -> None:
    """State without a name would be kept from call to call although nothing says that the plan has state."""
    halves = [plans.weight(name, (1.0, 2.0, 3.0, 4.0), 16 * i) for i, name in enumerate(names)]
    assert list(verify.problems(replace(keeping(), state=tuple(halves), state_nbytes=32))) == [sentence]


@pytest.mark.parametrize("shape", [[1] * 65, [0, 2**62, 2**62], [0, 2**63]])
def test_a_file_with_a_shape_that_no_array_has(loaded: Executable, tmp_path: Path, shape: list[int]) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors: not installed")
    nbytes = 0 if 0 in shape else 4
    header = json.dumps({"kept": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "state.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    with pytest.raises(InputError, match="safetensors: 'kept' has a shape that no array has: "):
        loaded.state.load(path)
