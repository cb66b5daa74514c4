"""The branches, loops and scans of an ONNX graph in a proof."""

from collections.abc import Sequence
from dataclasses import replace

from onnx import TensorProto, TypeProto

from nimblec.onnx_import.model_nodes import subgraphs
from nimblec.padding.folds import of_choice
from nimblec.padding.onnx_call import Call, UnknownUseError, rule, tensor_type
from nimblec.padding.rules import Propagation
from nimblec.padding.values import Value

_MOST_ROUNDS = 8
"""Rounds of a loop after which its state depends on anything."""


@rule("If")
def _if(call: Call) -> list[Value]:
    one, other = (call.scope.run_body(body) for body in subgraphs(call.node))
    call.types = [kind for _, kind in one]
    either = (_either(call.step, a, b) for (a, _), (b, _) in zip(one, other, strict=True))
    return [call.step.after(call.operands, value) for value in either]


@rule("Loop")
def _loop(call: Call) -> list[Value]:
    count = call.inputs[0]
    steps = None if count is None or count.array is None else int(count.array.reshape(-1)[0])
    head = [(Value(()), tensor_type(TensorProto.INT64, ())), (Value(()), tensor_type(TensorProto.BOOL, ()))]
    return _repeated(call, head, list(call.node.input[2:]), [], steps)


@rule("Scan")
def _scan(call: Call) -> list[Value]:
    if call.opset < 9 or any(name.endswith(("axes", "directions")) for name in call.attributes):
        raise UnknownUseError
    states = len(call.node.input) - call.attributes["num_scan_inputs"]
    names = list(call.node.input)
    steps = call.scope.values[names[states]].shape[0]
    return _repeated(call, [], names[:states], names[states:], steps)


def _repeated(
    call: Call,
    head: Sequence[tuple[Value, TypeProto]],
    state_names: Sequence[str],
    scanned_names: Sequence[str],
    steps: int | None,
) -> list[Value]:
    """Return the final state and the collected results of a body, repeated until its state depends on nothing new.

    The body takes the ``head``, the state, and an entry of each of the scanned values.
    """
    (body,) = subgraphs(call.node)
    scope = call.scope
    causes = [value for value in call.inputs[: len(head)] if value is not None]
    kinds = [scope.types[name] for name in state_names]
    states = [replace(scope.values[name], array=None) for name in state_names]
    entries = []
    for name in scanned_names:
        value, element = scope.values[name], scope.types[name].tensor_type.elem_type
        if 0 in value.axes or not value.is_sized:
            raise UnknownUseError
        shape = value.shape[1:]
        entries.append((call.step.reduce(value, {0}, shape, keeps=False), tensor_type(element, shape)))
    for _ in range(_MOST_ROUNDS):
        found = scope.run_body(body, [*head, *zip(states, kinds, strict=True), *entries])
        goes_on = [value for value, _ in found[: len(head) // 2]]
        left = [call.step.after([*causes, *goes_on], value) for value, _ in found[len(goes_on) :]]
        merged = [_either(call.step, *pair) for pair in zip(states, left[: len(states)], strict=True)]
        if merged == states:
            break
        states = merged
    else:
        raise UnknownUseError
    collected = left[len(states) :]
    elements = [kind.tensor_type.elem_type for _, kind in found[len(goes_on) + len(states) :]]
    if steps is None or not all(value.is_sized for value in collected):
        call.types = [*kinds, *(TypeProto() for _ in collected)]
        return [*states, *(call.step.unknown([value], None) for value in collected)]
    shapes = [(steps, *value.shape) for value in collected]
    call.types = [*kinds, *map(tensor_type, elements, shapes)]
    for value, shape in zip(collected, shapes, strict=True):
        axes = {axis + 1: carrier for axis, carrier in value.axes.items()}
        states.append(replace(value, shape=shape, axes=axes, array=None, stretched=frozenset()))
    return states


def _either(step: Propagation, one: Value, other: Value) -> Value:
    """Return a value that is one of two."""
    if not (one.is_sized and one.shape == other.shape):
        return step.unknown([one, other], None)
    return step.elementwise([Value(()), one, other], one.shape, of_choice)
