"""Bounds of sizes that depend on values: the shapes that a plan keeps for outputs, of which a run fills a part.

Some operators bound the size of their output by those of their inputs: `NonZero` finds no more elements than there are.
With inputs of the bound's size in place of such outputs, ONNX Runtime infers the bounds of what is computed from them.
"""

from collections.abc import Collection, Mapping
from math import prod

from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from nimblec.base.errors import UnsupportedModelError
from nimblec.cpu import ort_process
from nimblec.cpu.optimizer import OptimizedModel
from nimblec.cpu.ort_worker import RefusedError
from nimblec.cpu.values import Values, static_shape, with_outputs
from nimblec.onnx_import import model_file, model_nodes
from nimblert.plan.dimensions import Shape


def find_bounds(
    optimized: OptimizedModel, values: Values, wanted: Collection[str], given: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Return the largest shape of each of the unsized outputs ``wanted``; ``given`` are those that the user bounds.

    Raises UnsupportedModelError for an output that nothing bounds.
    """
    model = optimized.proto
    found = {name: given[name] for name in wanted if name in given}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    known = {name: tuple(tensor.dims) for name, tensor in constants.items()}
    known |= {name: tensor_type.shape for name, tensor_type in values.types.items()}
    inserted: dict[str, Shape] = {}
    while not found.keys() >= set(wanted):
        bounds = {
            name: shape
            for node in model.graph.node
            if not node.domain and any(name in values.unsized and name not in known for name in node.output)
            for name, shape in zip(node.output, _bounds(node, known, constants), strict=False)
            if name
        }
        if not bounds:
            return _declared(model, [name for name in wanted if name not in found]) | found
        inserted |= bounds
        known |= bounds | _inferred(optimized, values, inserted)
        found |= {name: known[name] for name in wanted if name in known and name not in found}
    return found


def _declared(model: ModelProto, wanted: Collection[str]) -> dict[str, Shape]:
    """Return the shapes that the model declares for outputs that nothing else bounds."""
    declared = {tensor.name: tensor for tensor in model_file.outputs(model)}
    for name in wanted:
        if None in (declared[name].shape or (None,)):
            node = next(node for node in model.graph.node if name in node.output)
            raise UnsupportedModelError(
                f"node {model_nodes.node_name(node)!r} ({node.op_type}): the size of output {name!r} depends on "
                f"values, and nothing bounds it: give its largest shape, --bound {name}=SHAPE"
            )
    return {name: static_shape(declared[name]) for name in wanted}


def _bounds(node: NodeProto, known: Mapping[str, Shape], constants: Mapping[str, TensorProto]) -> tuple[Shape, ...]:
    """Return the largest shapes of the outputs of a node of ONNX; empty where its inputs do not bound them."""
    if node.op_type == "If":
        return _of_both_branches(node)
    first, second = ([known.get(name) for name in node.input] + [None, None])[:2]
    if first is None:
        return ()
    axis = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"), None)
    count = prod(first) if axis is None else first[axis]
    taken = (count,) if axis is None else first
    bounds: dict[str, tuple[Shape, ...]] = {
        "Compress": (taken,),
        "NonZero": ((max(len(first), 1), prod(first)),),
        "Slice": (first,),
        "TopK": (first, first),
        "Unique": (taken, (count,), (count,), (count,)),
    }
    if node.op_type == "NonMaxSuppression" and second is not None:
        limit = constants.get(node.input[2]) if len(node.input) > 2 else None
        most = first[1] if limit is None else min(first[1], int(numpy_helper.to_array(limit).max()))
        return ((second[0] * second[1] * most, 3),)
    return bounds.get(node.op_type, ())


def _of_both_branches(node: NodeProto) -> tuple[Shape, ...]:
    """Return the largest sizes that the branches of an `If` declare for its outputs; empty if one has none."""
    values = zip(*(body.output for body in model_nodes.subgraphs(node)), strict=True)
    types = [[value.type.tensor_type for value in pair] for pair in values]
    if not all(of.HasField("shape") and all(map(model_file.is_static, of.shape.dim)) for pair in types for of in pair):
        return ()
    shapes = [[[dim.dim_value for dim in of.shape.dim] for of in pair] for pair in types]
    if any(len(one) != len(other) for one, other in shapes):
        return ()
    return tuple(tuple(map(max, one, other)) for one, other in shapes)


def _inferred(optimized: OptimizedModel, values: Values, inserted: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes that ONNX Runtime infers for unsized values, given the shapes of the ``inserted`` ones."""
    model = ModelProto()
    model.CopyFrom(optimized.proto)
    kept = [node for node in model.graph.node if inserted.keys().isdisjoint(node.output)]
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(kept)
    for name, shape in inserted.items():
        dtype = values.unsized.get(name) or values.types[name].dtype
        model.graph.input.append(helper.make_tensor_value_info(name, model_file.element_type(dtype), shape))
    model = with_outputs(model, [name for name, dtype in values.unsized.items() if dtype and name not in inserted])
    try:
        # This level folds the arithmetic of shapes.
        described, _ = ort_process.run(
            model.SerializeToString(), folder=str(optimized.folder), level="ORT_ENABLE_BASIC"
        )
    except RefusedError:
        return {}
    return {name: tuple(shape) for name, _, shape in described if shape and all(isinstance(n, int) for n in shape)}
