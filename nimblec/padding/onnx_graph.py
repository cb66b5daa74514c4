"""Prove on an ONNX graph which calls of other sizes its program can serve."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from onnx import ModelProto, inliner

from nimblec.padding import onnx_control, onnx_rules
from nimblec.padding.onnx_call import Scope, constants_of, shape_of
from nimblec.padding.values import Proof, given, prove

Dimensions: TypeAlias = Mapping[str, Sequence[str | None]]

_RULES = (onnx_rules, onnx_control)
"""Modules whose import fills the table of rules."""


def prove_onnx(
    model: ModelProto, inputs: Dimensions, outputs: Dimensions, sizes: Mapping[str, int], masks: Collection[str] = ()
) -> dict[str, Proof]:
    """Prove, for each dimension of ``sizes``, which other sizes a model with static shapes serves.

    ``inputs`` and ``outputs`` have the dimension of each axis. ``masks`` are inputs whose padding is 0.
    """
    if model.functions:
        model = inliner.inline_local_functions(model)
    constants = constants_of(model.graph)
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    proofs = {}
    for name, size in sizes.items():
        entering = dict(constants)
        for tensor in model.graph.input if size > 1 else ():
            shape = shape_of(tensor.type) or ()
            of = inputs.get(tensor.name, (None,) * len(shape))
            entering[tensor.name] = given(shape, of, name, 0 if tensor.name in masks else None), tensor.type
        found = Scope(name, size, opsets, model.ir_version).run(model.graph, entering) if size > 1 else []
        results = zip((output.name for output in model.graph.output), found, strict=False)
        proofs[name] = prove(
            [(value, outputs[output]) for output, (value, _) in results if output in outputs], name, size
        )
    return proofs
