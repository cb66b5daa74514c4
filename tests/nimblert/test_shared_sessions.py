"""Sessions that programs share which differ only in sizes."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from cpu_plans import floats, write_model
from onnx import NodeProto, helper

import nimblec
import nimblert
from nimblert.check.onnx_model import Graph, TensorValue
from nimblert.cpu.backend import CpuLoaded
from nimblert.cpu.sizes import Form, embedded_inputs
from nimblert.errors import PlanInvalidError
from nimblert.plan import Plan

WIDTH, SIZES = 128, (2, 4, 8)
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32)
ROWS = RNG.standard_normal((max(SIZES), WIDTH)).astype(np.float32)

node = helper.make_node


def compiled(path: Path, nodes: Sequence[NodeProto], sizes: Sequence[int] = SIZES, **constants: np.ndarray) -> Plan:
    """Return the plan of nodes from x (N x WIDTH) to y, of which ``rows`` are the first N rows of ROWS."""
    cut = [node("Shape", ["x"], ["n"], start=0, end=1), node("Slice", ["all", "zero", "n"], ["rows"])]
    made = {"all": ROWS, "zero": np.array([0]), "w": WEIGHT, **constants}
    written = write_model(
        path / "model.onnx", [*cut, *nodes], [floats("x", "N", WIDTH)], [floats("y", "N", "M")], constants=made
    )
    return nimblec.compile(written, target="cpu", dims={"N": tuple(sizes)}, plan_cache=None)


def products() -> list[NodeProto]:
    """Return nodes with a weight for all sizes, and a constant, a shape and inner values for each."""
    return [
        node("MatMul", ["x", "w"], ["a"]),
        node("Mul", ["a", "rows"], ["b"]),
        node("Softmax", ["b"], ["c"]),
        node("MatMul", ["c", "w"], ["y"]),
    ]


def drawn(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal((size, WIDTH)).astype(np.float32)


def sessions(plan: Plan) -> int:
    """Return the number of sessions once all programs are loaded, each of which is run."""
    loaded = CpuLoaded(plan, threads=1)
    working = loaded.working()
    for program in plan.programs:
        with closing(loaded.backend(program, working)) as backend:
            backend.run()
    return len(loaded.sessions)


def test_sizes_share_a_session_and_compute_what_each_alone_does(tmp_path: Path) -> None:
    plan = compiled(tmp_path, products())
    assert len(plan.programs) == len(SIZES)
    assert sessions(plan) == 1
    with nimblert.load(plan, threads=1) as model:
        for size in (*SIZES, *SIZES):
            alone = replace(plan, programs=tuple(p for p in plan.programs if dict(p.profile)["N"] == size))
            loaded = CpuLoaded(alone, threads=1)
            with closing(loaded.backend(alone.programs[0], loaded.working())) as backend:
                backend.place([drawn(size)])
                backend.run()
                assert np.array_equal(model(drawn(size)), backend.outputs[0])


def test_weight_of_one_size_has_a_session_of_its_own(tmp_path: Path) -> None:
    """A weight that ONNX Runtime packs stays a constant."""
    plan = compiled(tmp_path, [node("Transpose", ["rows"], ["r"], perm=[1, 0]), node("MatMul", ["x", "r"], ["y"])])
    assert sessions(plan) == len(SIZES)


def test_shared_session_refuses_a_false_shape_of_another_size(tmp_path: Path) -> None:
    """ONNX Runtime trusts the declared shapes of inner values: each size is checked with its own."""
    plan = compiled(tmp_path, products())
    kernel = next(i for i, k in enumerate(plan.kernels) if any(p.shape == (SIZES[-1], WIDTH) for p in k.parameters))
    code = onnx.load_from_string(bytes(plan.modules[plan.kernels[kernel].module].code))
    code.graph.value_info[0].type.tensor_type.shape.dim[0].dim_value = 1
    modules = list(plan.modules)
    module = plan.kernels[kernel].module
    modules[module] = replace(modules[module], code=memoryview(code.SerializeToString()))
    loaded = CpuLoaded(replace(plan, modules=tuple(modules)), threads=1)
    working = loaded.working()
    true, false = plan.programs[0], plan.programs[-1]
    loaded.backend(true, working).close()
    with pytest.raises(PlanInvalidError, match="is declared"):
        loaded.backend(false, working)


@pytest.mark.parametrize("location", [None, 0])
def test_embedded_inputs_may_be_stated_to_be_within_the_model(location: int | None) -> None:
    raw = np.array([1, 2]).tobytes()
    tensor = TensorValue(name="i1", data_type=7, dims=(2,), raw_data=raw, data_location=location)
    form = Form(code=b"", inputs=frozenset({"i1"}))
    ((name, value),) = embedded_inputs(Graph(initializer=(tensor,)), form)
    assert (name, value.tolist()) == ("i1", [1, 2])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory as Linux counts it")
def test_memory_does_not_grow_with_the_number_of_sizes(tmp_path: Path) -> None:
    """Each session packs a copy of its weights."""
    width = 2048
    weight = np.ones((WIDTH, width), np.float32)
    square = np.ones((width, width), np.float32)
    nodes = [node("MatMul", ["x", "wide"], ["a"]), node("MatMul", ["a", "square"], ["y"])]
    plan = compiled(tmp_path, nodes, range(1, 9), wide=weight, square=square)
    with nimblert.load(plan, threads=1) as model:
        model(drawn(1))
        before = resident_nbytes()
        for size in range(2, 9):
            model(drawn(size))
        assert resident_nbytes() - before < square.nbytes


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
