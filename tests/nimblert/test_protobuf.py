"""What is read of a model is what every parser reads: one meaning, one way to write it."""

import random

import plans
import pytest
from onnx import ModelProto, TensorProto, helper

from nimblert.check.onnx_model import read_model
from nimblert.check.protobuf import Budget
from nimblert.errors import PlanFormatError

FIELDS = 1 << 16


def model() -> bytes:
    """Return a model with every kind of field that a plan's may have."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["b"])],
        "body",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, ["n", None])],
        [helper.make_tensor("a", TensorProto.FLOAT, [2], [1.5, -2.5])],
    )
    node = helper.make_node("If", ["c", ""], ["y"], then_branch=body, else_branch=body, alpha=-0.0, beta=-7, name="n")
    node.attribute.append(helper.make_attribute("list", [1, -1, 1 << 62]))
    node.attribute.append(helper.make_attribute("reals", [0.5, float("inf")]))
    node.attribute.append(helper.make_attribute("words", ["a", "b"]))
    node.attribute.append(helper.make_attribute("t", helper.make_tensor("t", TensorProto.INT64, [2], [-1, 1 << 40])))
    tensors = [
        helper.make_tensor("d", TensorProto.DOUBLE, [1], [0.1]),
        helper.make_tensor("i", TensorProto.INT8, [2], [-3, 3]),
        helper.make_tensor("u", TensorProto.UINT64, [1], [(1 << 64) - 1]),
        helper.make_tensor("r", TensorProto.FLOAT, [1], b"1234", raw=True),
    ]
    graph = helper.make_graph([node], "kernel", [helper.make_tensor_value_info("c", 9, [])], [], tensors)
    return bytes(ModelProto(ir_version=9, graph=graph).SerializeToString(deterministic=True))


MODELS = [model(), *(bytes(module.code) for module in plans.cpu_plan().modules)]


def test_fields_are_what_onnx_reads() -> None:
    record, message = read_model(MODELS[0], Budget(FIELDS)), ModelProto.FromString(MODELS[0])
    assert record.graph is not None
    (node,), (expected,) = record.graph.node, message.graph.node
    assert node.input == tuple(expected.input)
    for attribute, other in zip(node.attribute, expected.attribute, strict=True):
        assert (attribute.name, attribute.type) == (other.name, other.type)
        assert attribute.ints == tuple(other.ints)
        assert attribute.floats == tuple(other.floats)
        assert attribute.strings == tuple(other.strings)
    for tensor, given in zip(record.graph.initializer, message.graph.initializer, strict=True):
        assert tensor.double_data == tuple(given.double_data)
        assert tensor.int32_data == tuple(given.int32_data)
        assert tensor.uint64_data == tuple(given.uint64_data)
        assert (tensor.raw_data or b"") == given.raw_data
    body = next(attribute.g for attribute in node.attribute if attribute.g is not None)
    assert body.initializer[0].float_data == (1.5, -2.5)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_read_is_the_one_way_to_write_it(seed: int) -> None:
    """Onnx reads the same bytes, has no unknown fields, and writes them again as they were."""
    rng = random.Random(seed)  # noqa: S311 - reproducible damage, no secrets
    accepted = 0
    for _ in range(3000):
        data = bytearray(rng.choice(MODELS))
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(data))
            action = rng.randrange(4)
            if action == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif action == 1:
                data[at] = rng.choice((0, 1, 127, 128, 255))
            elif action == 2:
                data[at:at] = data[at : at + rng.randrange(1, 9)]
            else:
                del data[at : at + rng.randrange(1, 5)]
        try:
            read_model(bytes(data), Budget(FIELDS))
        except PlanFormatError:
            continue
        accepted += 1
        assert ModelProto.FromString(bytes(data)).SerializeToString(deterministic=True) == bytes(data)
    assert accepted > 50


def field(number: int, wire_type: int, content: bytes) -> bytes:
    return bytes([number << 3 | wire_type]) + content


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (field(1, 0, b"\x09") * 2, "Model.ir_version at byte .* is out of order"),
        (field(8, 2, b"\x00") + field(1, 0, b"\x09"), "Model.ir_version at byte .* is out of order"),
        (field(2, 2, b"\x00"), "field 2 of wire type 2 at byte 1 is none that Model may have"),
        (field(1, 2, b"\x00"), "field 1 of wire type 2 at byte 1 is none that Model may have"),
        (field(1, 3, b""), "field 1 of wire type 3 at byte 1 is none that Model may have"),
        (field(1, 0, b"\x89\x00"), "longer than it need be"),
        (field(1, 0, b"\x80" * 10 + b"\x01"), "longer than it need be"),
        (field(1, 0, b"\xff"), "cut short"),
        (field(7, 2, b"\x05"), "ends at 7, beyond its message"),
        (field(7, 2, b"\x04" + field(2, 2, b"\x02\xff\xfe")), "name at byte .* is not UTF-8"),
        (field(7, 2, b"\x04" + field(5, 2, b"\x02" + field(4, 2, b"\x00"))), "float_data at byte .* is an empty block"),
    ],
)
def test_what_parsers_may_read_differently_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        read_model(data, Budget(FIELDS))


def test_a_message_of_more_fields_than_may_be_is_refused() -> None:
    with pytest.raises(PlanFormatError, match="more fields"):
        read_model(MODELS[0], Budget(20))


def test_messages_within_messages_have_a_limit() -> None:
    kind = b""
    for _ in range(60):
        kind = field(4, 2, _nested(1, kind))
    value = field(2, 2, _sized(kind))
    graph = field(11, 2, _sized(value))
    with pytest.raises(PlanFormatError, match="deeper than"):
        read_model(field(7, 2, _sized(graph)), Budget(FIELDS))


def _nested(number: int, content: bytes) -> bytes:
    return _sized(field(number, 2, _sized(content)))


def _sized(content: bytes) -> bytes:
    """Return the content behind its length."""
    length = len(content)
    prefix = bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*prefix, length]) + content
