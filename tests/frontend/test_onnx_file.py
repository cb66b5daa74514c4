"""Reading ONNX files: what is wrong with one is said in one sentence; dynamic shapes are fixed."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cpu_plans import floats, write_model
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import nimblec
import nimblert
from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.base.options import InputSpec, NamedInput
from nimblec.onnx_import import model_file, model_shapes
from nimblec.onnx_import.model_file import ModelTensor
from nimblert.plan import ITEM_NBYTES

node = helper.make_node


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def image_model(path: Path) -> ModelProto:
    """Return a model of two images of a dynamic batch and size, the second from a constant's shape on."""
    write_model(
        path,
        [node("Add", ["x", "z"], ["s"]), node("Mul", ["s", "w"], ["y"])],
        [floats("x", "batch", 3, "height", 8), floats("z", "batch", 3, "height", 8), floats("w", 8)],
        [floats("y", "batch", 3, "height", 8)],
        constants={"w": np.ones(8, np.float32)},
    )
    return model_file.load(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"import torch\n", bytes(4096), b"PK\x03\x04" + bytes(100), b"\x08\x08"]
)
def test_what_is_not_an_onnx_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CompileError, match=r"model\.onnx: not an ONNX file"):
        model_file.load(path)


def test_every_truncation_is_refused_or_says_what_is_missing(path: Path) -> None:
    image_model(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CompileError):
            model_file.load(path)


def test_unknown_operators_are_listed_all(path: Path) -> None:
    inner = helper.make_graph(
        [node("Lost", [], ["b"], name="third")], "inner", [], [helper.make_empty_tensor_value_info("b")]
    )
    nodes = [
        node("Frobnicate", ["x"], ["a"], name="first"),
        node("Relu", ["a"], ["c"], name="known"),
        node("Mish2", ["c"], ["d"], domain="my.ops"),
        node("If", ["k"], ["y"], then_branch=inner, else_branch=inner),
        node("FusedMatMul", ["x", "x"], ["e"], domain="com.microsoft"),
    ]
    write_model(path, nodes, [floats("x", 2), ("k", TensorProto.BOOL, ())], [floats("y", 2)])
    with pytest.raises(UnsupportedModelError) as caught:
        model_file.load(path)
    message = str(caught.value)
    assert "node 'first': unknown operator Frobnicate (opset 18)" in message
    assert "node 'd': unknown operator my.ops.Mish2 (opset not imported)" in message
    assert "node 'third': unknown operator Lost" in message
    assert "Relu" not in message
    assert "FusedMatMul" not in message


def test_onnx_file_knows_opset_of_operator(path: Path) -> None:
    nodes = [node("Gelu", ["x"], ["y"])]
    with pytest.raises(UnsupportedModelError, match=r"unknown operator Gelu \(opset 18\)"):
        model_file.load(write_model(path, nodes, [floats("x", 2)], [floats("y", 2)], opset=18))
    model_file.load(write_model(path, nodes, [floats("x", 2)], [floats("y", 2)], opset=20))


def test_onnx_file_checks_functions(path: Path) -> None:
    def save(op_type: str) -> None:
        body = [node(op_type, ["a"], ["b"], name="inside")]
        function = helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
        write_model(
            path, [node("F", ["x"], ["y"], domain="local")], [floats("x", 2)], [floats("y", 2)], functions=[function]
        )

    save("Relu")
    model_file.load(path)
    save("Frob")
    with pytest.raises(UnsupportedModelError, match="node 'inside': unknown operator Frob"):
        model_file.load(path)


def test_signature(path: Path) -> None:
    model = image_model(path)
    assert model_file.inputs(model) == (
        ModelTensor(name="x", dtype="float32", shape=(None, 3, None, 8)),
        ModelTensor(name="z", dtype="float32", shape=(None, 3, None, 8)),
    )
    assert [tensor.name for tensor in model_file.outputs(model)] == ["y"]


def test_every_dtype_of_a_plan_has_an_element_type() -> None:
    for name in ITEM_NBYTES:
        assert model_file.dtype_name(model_file.element_type(name)) == name
    assert model_file.dtype_name(TensorProto.STRING) is None


def test_a_dynamic_dimension_names_itself_and_the_flag(path: Path) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", "batch", 3, 224, 224)], [floats("y", None)])
    with pytest.raises(UnsupportedModelError) as caught:
        model_shapes.fix_shapes(model_file.load(path), ())
    assert str(caught.value) == (
        "input 'x' has the dynamic dimension 'batch' (axis 0): give --dim batch=1 or --input x:1x3x224x224"
    )


def test_an_input_without_any_shape_needs_a_spec(path: Path) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [("x", TensorProto.FLOAT, None)], [("y", TensorProto.FLOAT, None)])
    model = model_file.load(path)
    with pytest.raises(UnsupportedModelError, match="input 'x' has no shape: give --input x:"):
        model_shapes.fix_shapes(model, ())
    for shape in ((2, 5), ()):
        fixed = model_shapes.fix_shapes(model, [InputSpec(name="x", shape=shape)])
        assert model_file.inputs(fixed)[0].shape == shape


def test_one_spec_fixes_the_named_dimension_everywhere(path: Path) -> None:
    model = image_model(path)
    before = model.SerializeToString()
    fixed = model_shapes.fix_shapes(model, [InputSpec(name="x", shape=(2, 3, 5, 8))])
    assert [tensor.shape for tensor in model_file.inputs(fixed)] == [(2, 3, 5, 8)] * 2
    assert model_file.outputs(fixed)[0].shape == (2, 3, 5, 8)
    assert [value.name for value in fixed.graph.input] == ["x", "z"]
    assert model.SerializeToString() == before
    onnx.checker.check_model(fixed)


def test_sizes_are_given_by_name_and_a_spec_wins(path: Path) -> None:
    model = image_model(path)
    dims = [("batch", 4), ("height", 6)]
    fixed = model_shapes.fix_shapes(model, (), dims)
    assert [tensor.shape for tensor in (*model_file.inputs(fixed), *model_file.outputs(fixed))] == [(4, 3, 6, 8)] * 3
    fixed = model_shapes.fix_shapes(model, [InputSpec(name="z", shape=(2, 3, 5, 8))], dims)
    assert [tensor.shape for tensor in model_file.inputs(fixed)] == [(2, 3, 5, 8)] * 2


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ([("bat", 4)], r"--dim bat: no input has a dimension of that name; the names are 'batch', 'height'"),
        ([("batch", 4), ("height", 1), ("batch", 5)], r"--dim batch: given twice, 4 and 5; give it once"),
        ([("batch", 4)], r"input 'x' has the dynamic dimension 'height' \(axis 2\): give --dim height=<height> or"),
    ],
)
def test_names_that_do_not_fit_or_do_not_suffice(path: Path, dims: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_shapes.fix_shapes(image_model(path), (), dims)


def test_a_dimension_without_a_name_needs_a_spec(path: Path) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", "a b", None, 2)], [floats("y", None, None, 2)])
    model = model_file.load(path)
    with pytest.raises(UnsupportedModelError) as caught:
        model_shapes.fix_shapes(model, ())
    assert str(caught.value) == (
        "input 'x' has the dynamic dimensions 'a b' (axis 0), of axis 1: give --input x:1x<1>x2, or for several sizes "
        "--input 'x:a b,dim1,2' --dim 'a b'=1..16 --dim dim1=<sizes>"
    )
    with pytest.raises(UnsupportedModelError, match=r"dimension of axis 1: give --input x:3x<1>x2"):
        model_shapes.fix_shapes(model, (), [("a b", 3)])


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ((None, 4), ": give one this name, --input x:batch,4"),
        (("?",), ": give one this name, --input x:batch,"),
        ((3, None, None), ": give one this name, --input 'x:3,batch,<2>'"),
        (None, ": give one this name, --input 'x:batch,<sizes>'"),
        ((2, 4), ", and all have sizes: leave --dim out, or export the model with a dynamic dimension"),
    ],
)
def test_a_name_for_a_model_without_names(path: Path, shape: tuple[int | str | None, ...] | None, way: str) -> None:
    inputs = [floats("scale"), ("x", TensorProto.FLOAT, shape)]
    write_model(path, [node("Mul", ["scale", "x"], ["y"])], inputs, [("y", TensorProto.FLOAT, shape)])
    with pytest.raises(UnsupportedModelError) as caught:
        model_shapes.fix_shapes(model_file.load(path), (), [("batch", 3)])
    assert str(caught.value) == f"--dim batch: no dimension of the model's inputs has a name{way}"


def test_dimensions_without_names_are_given_some(path: Path) -> None:
    inputs = [floats("x", "a b", None, 2), floats("z", "unk__7", 2), ("w", TensorProto.FLOAT, None)]
    write_model(path, [node("Relu", [i[0]], [f"{i[0]}_out"]) for i in inputs], inputs, [floats("x_out", None, None, 2)])
    model = model_file.load(path)
    names = [("x", ("a b", "n", 2)), ("z", ("n", 2)), ("w", ("n", 3))]
    model_shapes.name_dimensions(model, [NamedInput(name=name, shape=shape) for name, shape in names])
    fixed = model_shapes.fix_shapes(model, (), [("a b", 4), ("n", 5)])
    assert [tensor.shape for tensor in model_file.inputs(fixed)] == [(4, 5, 2), (5, 2), (5, 3)]
    with pytest.raises(UnsupportedModelError, match=r"dimension 'n' \(axis 1\): give --dim n=<n> or --input x:3x<n>x2"):
        model_shapes.fix_shapes(model, (), [("a b", 3)])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", ("n",), r"^--input q: the model has no such input; its inputs are 'x', 'z'$"),
        ("x", ("n", 3), r"^--input x: 2 dimensions, the model's input has 4 \(\?x3x\?x8\)$"),
        ("x", ("batch", "n", "height", 8), r"^--input x: 'n' at axis 1, the model's input has 3 there"),
        ("x", ("batch", 3, "height", 8, "None"), r"^--input x: 5 dimensions, the model's input has 4"),
        ("x", ("n", 3, "height", 8), r"^--input x: 'n' at axis 0, which the model calls 'batch': give 'batch' there"),
        ("x", ("batch", 3, 5, 8), r"^--input x: 5 at axis 2, .* 'height': give 'height' there, and its size by --dim$"),
    ],
)
def test_names_of_dimensions_that_do_not_fit(path: Path, name: str, shape: tuple[int | str, ...], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_shapes.name_dimensions(image_model(path), [NamedInput(name=name, shape=shape)])


@pytest.mark.parametrize("name", ["None", "unk__3", "null"])
def test_a_placeholder_gives_no_name(path: Path, name: str) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", None, 2)], [floats("y", None, 2)])
    with pytest.raises(UnsupportedModelError, match=f"^--input x: '{name}' at axis 0 stands for no name: give another"):
        model_shapes.name_dimensions(model_file.load(path), [NamedInput(name="x", shape=(name, 2))])


@pytest.mark.parametrize(
    ("inputs", "outputs", "sentence"),
    [
        ([floats("x", 2)], [], "the graph has no outputs, and a plan computes nothing else"),
        ([floats("x", 2)], [floats("y", 2)] * 2, "output 'y' is listed twice: list it once"),
        (*[[(name, TensorProto.STRING, (2,))] for name in "xy"], "input 'x' has the dtype string, which a plan cannot"),
        (*[[(name, TensorProto.FLOAT8E4M3FN, (2,))] for name in "xy"], "input 'x' has the dtype float8e4m3fn, which"),
    ],
)
def test_onnx_file_refuses(path: Path, inputs: list[Any], outputs: list[Any], sentence: str) -> None:
    write_model(path, [node("Identity", ["x"], ["y"])], inputs, outputs)
    with pytest.raises(CompileError, match=sentence):
        model_file.inputs(model_file.load(path))


def test_inputs_that_are_no_tensors(path: Path) -> None:
    write_model(path, [node("SequenceLength", ["s"], ["y"])], [floats("x", 2)], [("y", TensorProto.INT64, ())])
    model = model_file.load(path)
    model.graph.input.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedModelError, match="input 's' is a sequence, expected a tensor"):
        model_file.inputs(model)


def test_zip_map_gives_scores() -> None:
    """Exporters end classifiers in ZipMap: the output is the tensor before it."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18, "ai.onnx.ml" : 2]>
        g (float[2,2] x) => (seq(map(int64, float)) p) {
            s = Softmax(x)
            p = ai.onnx.ml.ZipMap<classlabels_int64s=[0, 1]>(s)
        }"""
    )
    x = np.random.default_rng(0).standard_normal((2, 2)).astype(np.float32)
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None)) as loaded:
        exponentials = np.exp(x)
        np.testing.assert_allclose(loaded(x), exponentials / exponentials.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("name", ["unk__12", "unknown_3"])
def test_numbered_placeholder_is_a_name_where_it_is_given(path: Path, name: str) -> None:
    inputs = [floats("x", name, 2), floats("z", name, 2)]
    write_model(path, [node("Add", ["x", "z"], ["y"])], inputs, [floats("y", name, 2)])
    model = model_file.load(path)
    fixed = model_shapes.fix_shapes(model, (), [(name, 3)])
    assert [tensor.shape for tensor in model_file.inputs(fixed)] == [(3, 2), (3, 2)]
    with pytest.raises(UnsupportedModelError, match=r"no dimension .* give one this name, --input x:n,2$"):
        model_shapes.fix_shapes(model, (), [("?", 3)])


def test_baked_batch_is_told_the_way_out() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[batch,2,3] x, int64[1] i) => (float[b,6] y) <int64[2] s={1,6}> { y = Reshape(x, s) }"""
    )
    sentence = r"Reshape node.*: The input tensor cannot be reshaped.*}; if the exporter wrote the sizes of its example"
    with pytest.raises(CompileError, match=sentence) as caught:
        nimblec.compile(model, target="cpu", plan_cache=None, dims={"batch": 2})
    assert not re.search(r"\.h:|--example", str(caught.value))


@pytest.mark.parametrize("location", ["/etc/passwd", "../model.data", "", "a\0b", "@@"])
def test_external_data_outside_the_models_folder(path: Path, location: str) -> None:
    model = image_model(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path.write_bytes(model.SerializeToString().replace(b"@@", b"\xff\xfe"))  # which is not UTF-8
    with pytest.raises(CompileError, match=r"initializer 'w' names the data file .*, expected one below"):
        model_file.load(path)


def test_external_data_behind_a_link_out_of_the_models_folder(path: Path) -> None:
    (path.parent / "model").mkdir()
    path = path.parent / "model" / path.name
    onnx.save(image_model(path), path, save_as_external_data=True, location="data", size_threshold=0)
    (path.parent / "data").rename(path.parent.parent / "elsewhere")
    (path.parent / "data").symlink_to("../elsewhere")
    with pytest.raises(CompileError, match=r"data: is a link out of the model's folder; initializer 'w' is stored in"):
        model_file.load(path)
    (path.parent / "data").unlink()
    (path.parent / "data").symlink_to("data")
    with pytest.raises(CompileError, match="data: missing; initializer 'w'"):
        model_file.load(path)


def test_external_data_are_read_into_the_model_where_asked(path: Path) -> None:
    onnx.save(image_model(path), path, save_as_external_data=True, location="data", size_threshold=0)
    assert model_file.load(path).graph.initializer[0].raw_data == np.ones(8, np.float32).tobytes()
    assert not model_file.load(path, external_data=False).graph.initializer[0].raw_data


def test_onnx_file_reads_data_of_length_0(tmp_path: Path) -> None:
    """ONNX Runtime accepts such a file, which onnx itself writes for an empty tensor."""
    given = {
        "empty": (TensorProto.FLOAT, (0, 3), b""),
        "floats": (TensorProto.FLOAT, (5, 3), np.arange(15, dtype=np.float32).tobytes()),
        "packed": (TensorProto.INT4, (3,), b"\x21\x03"),
        "integers": (TensorProto.INT64, (3,), np.arange(3).tobytes()),
    }
    tensors, content = [], b""
    for name, (kind, dims, data) in given.items():
        tensor = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "data"), ("offset", str(len(content))), ("length", "0")):
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
        content += data
    (tmp_path / "data").write_bytes(content)
    graph = helper.make_graph([], "g", [], [helper.make_tensor_value_info("floats", 1, (5, 3))], initializer=tensors)
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]).SerializeToString())
    found = {tensor.name: tensor.raw_data for tensor in model_file.load(path).graph.initializer}
    assert found == {name: data for name, (_, _, data) in given.items()}


def test_external_data_of_a_sparse_tensor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are below the model's folder, whatever the current one has."""
    model = helper.make_model(helper.make_graph([], "g", [], [helper.make_tensor_value_info("w", 1, (4,))]))
    sparse = model.graph.sparse_initializer.add(dims=[4])
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([0, 3])))
    sparse.values.CopyFrom(TensorProto(name="w", data_type=1, dims=[2], data_location=TensorProto.EXTERNAL))
    sparse.values.external_data.add(key="location", value="data")
    onnx.save(model, path)
    monkeypatch.chdir(path.parent)
    (path.parent / "elsewhere").mkdir()
    (path.parent / "elsewhere" / path.name).write_bytes(path.read_bytes())
    (path.parent / "data").write_bytes(np.array([5, 7], np.float32).tobytes())
    assert model_file.load(path).graph.sparse_initializer[0].values.raw_data == (path.parent / "data").read_bytes()
    with pytest.raises(CompileError, match=r"initializer 'w' of .* is stored in it"):
        model_file.load(path.parent / "elsewhere" / path.name)


@pytest.mark.parametrize("name", ["?", "*", "-1", "None", "", " ", "unk__12", "unk", "unknown_3"])
def test_a_placeholder_for_a_name_is_none(path: Path, name: str) -> None:
    write_model(
        path, [node("Relu", ["x"], ["y"])], [floats("x", "n", 3, name, name)], [floats("y", "n", 3, name, name)]
    )
    model = model_file.load(path)
    fixed = model_shapes.fix_shapes(model, [InputSpec(name="x", shape=(2, 3, 48, 192))])
    assert model_file.inputs(fixed)[0].shape == (2, 3, 48, 192)
    with pytest.raises(UnsupportedModelError, match=r"dimensions of axis 2, of axis 3: give --input x:2x3x<2>x<3>,"):
        model_shapes.fix_shapes(model, (), [("n", 2)])
    with pytest.raises(UnsupportedModelError, match=r"no input has a dimension of that name; the names are 'n'$"):
        model_shapes.fix_shapes(model, (), [("?", 2)])


@pytest.mark.parametrize("name", ["unk_tokens", "?height", "nonempty", "p2o.DynamicDimension.1"])
def test_a_name_that_looks_like_a_placeholder_is_one_dimension(path: Path, name: str) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", name, name)], [floats("y", name, name)])
    with pytest.raises(UnsupportedModelError, match="makes it 2"):
        model_shapes.fix_shapes(model_file.load(path), [InputSpec(name="x", shape=(2, 3))])


@pytest.mark.parametrize(("domain", "shown"), [("", "ONNX"), ("ai.onnx.ml", "ai.onnx.ml")])
def test_an_opset_of_the_future_is_refused_with_the_newest_known(path: Path, domain: str, shown: str) -> None:
    model = image_model(path)
    body = helper.make_graph([node("Relu", ["x"], ["b"])], "body", [], [helper.make_empty_tensor_value_info("b")])
    model.graph.node.append(node("If", ["k"], ["c"], then_branch=body, else_branch=body))
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", 18), helper.make_opsetid(domain, 99)])
    path.write_bytes(model.SerializeToString())
    newest = onnx.defs.C.schema_version_map()[domain][1]
    with pytest.raises(UnsupportedModelError) as refused:
        model_file.load(path)
    assert str(refused.value) == (
        f"the model needs opset 99 of {shown}: the newest that onnx {onnx.__version__} knows is {newest}: export the "
        "model for that one, or an older one"
    )


def test_a_negative_size_of_a_tensor(path: Path) -> None:
    model = image_model(path)
    model.graph.initializer[0].dims[:] = [-8]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CompileError, match=r"model\.onnx: damaged: tensor 'w' has the shape -8"):
        model_file.load(path)
