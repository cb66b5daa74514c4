"""DLPack and the CUDA array interface, by capsules over host memory that only say that they are on a GPU."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nimblert.arrays import device_arrays, dlpack
from nimblert.arrays.device_arrays import DeviceOutput
from nimblert.arrays.dlpack import DeviceArray
from nimblert.errors import InputError


class Producer:
    """An array of a library whose memory is said to be on a GPU: numpy's capsule."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.streams: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1

    def __dlpack__(self, *, stream: int) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "complex64"])
def test_an_array_comes_by_its_capsule(dtype: str) -> None:
    array = np.zeros((3, 4, 5), dtype).transpose(2, 0, 1)[:, 1:]
    producer = Producer(array)
    assert device_arrays.place(producer) == ("cuda", 1)
    found = device_arrays.take(producer, 77)
    device_arrays.take(producer, 0)
    assert producer.streams == [77, 1]
    assert (found.address, found.dtype, found.shape) == (array.ctypes.data, dtype, (5, 2, 4))
    assert found.strides == (1, 20, 5)
    assert found.stream is None


def test_torchs_tensors_come_with_their_dtypes() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    found = dlpack.from_capsule(tensor.__dlpack__())
    assert (found.address, found.dtype, found.strides) == (tensor.data_ptr(), "bfloat16", (3, 1))
    with pytest.raises(InputError, match=r"it does not come by DLPack: .*require"):
        device_arrays.take(torch.zeros(2, requires_grad=True), 5)


def test_torchs_tensors_come_by_its_table_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch offers none")
    tensor = torch.zeros(4, 3, dtype=torch.bfloat16).t()[1:]
    assert device_arrays.at_once(tensor) is None  # not on a GPU
    monkeypatch.setattr(dlpack, "CUDA", 1)
    found = device_arrays.at_once(tensor)
    assert found is not None
    assert (found.address, found.dtype, found.shape) == (tensor.data_ptr(), "bfloat16", (2, 4))
    assert (found.strides, found.device, found.stream) == ((1, 3), 0, 0)
    assert found.owner is tensor
    for other in (torch.zeros(2, requires_grad=True), torch.zeros(2, dtype=torch.complex64).conj(), np.zeros(2)):
        assert device_arrays.at_once(other) is None
    with pytest.raises(InputError, match="it does not come by DLPack"):
        device_arrays.at_once(torch.zeros(2, 2).to_sparse())


def test_an_array_comes_by_the_interface() -> None:
    interface = {"version": 3, "shape": (2, 3), "typestr": "<f2", "data": (4096, True), "strides": (2, 4), "stream": 1}
    value = SimpleNamespace(__cuda_array_interface__=interface)
    assert device_arrays.place(value) == ("cuda", -1)
    assert device_arrays.take(value, 5) == DeviceArray(
        address=4096, dtype="float16", shape=(2, 3), strides=(1, 2), device=-1, read_only=True, stream=1, owner=value
    )
    del interface["strides"], interface["stream"]
    assert device_arrays.take(value, 5).strides == (3, 1)
    interface["strides"] = (3, 1)
    with pytest.raises(InputError, match="its strides are not multiples of the element size"):
        device_arrays.take(value, 5)
    interface |= {"strides": None, "data": (0, False)}
    with pytest.raises(InputError, match="it has no memory"):
        device_arrays.take(value, 5)
    interface["shape"] = (0, 3)
    assert not device_arrays.take(value, 5).span
    for entry, sentence in (({"typestr": ">f2"}, "dtype >f2, expected <f2"), ({"mask": value}, "plans have no masks")):
        other = SimpleNamespace(__cuda_array_interface__={**interface, **entry})
        with pytest.raises(InputError, match=sentence):
            device_arrays.take(other, 5)


MALFORMED: dict[str, tuple[Any, str]] = {
    "no dict": (None, "is None, expected a dict"),
    "nothing": ({}, "has no 'data'"),
    "no typestr": ({"data": (4096, False)}, "has no 'typestr'"),
    "no shape": ({"data": (4096, False), "typestr": "<f4"}, "has no 'shape'"),
} | {
    f"{name} {value!r}": ({"data": (4096, False), "typestr": "<f4", "shape": (2, 3), name: value}, f"has '{name}' ")
    for name, values in {
        "data": (4096, None, (4096,), ("0x1000", False), (4096.0, False), (-1, False), (1 << 64, False)),
        "typestr": (None, 4, "", "f4,f4", "(2,", "S", "<q2", "V99999999999", "V" + "9" * 5000),
        "shape": (6, None, (2, 3.0), "23", ((2, 3),)),
        "strides": (4, (12, 4.0), "ab"),
        "stream": ("1", 1.5, -1, 1 << 64),
    }.items()
    for value in values
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_interface_is_one_sentence(case: str) -> None:
    interface, sentence = MALFORMED[case]
    value = SimpleNamespace(__cuda_array_interface__=interface)
    with pytest.raises(InputError, match=f"its __cuda_array_interface__ {sentence}") as refused:
        device_arrays.take(value, 5)
    assert len(str(refused.value)) < 200


def test_strides_are_as_many_as_axes() -> None:
    interface = {"data": (4096, False), "typestr": "<f4", "shape": (2, 3), "strides": (4,)}
    with pytest.raises(InputError, match="has 1 strides for 2 axes"):
        device_arrays.take(SimpleNamespace(__cuda_array_interface__=interface), 5)


def test_a_tensor_whose_numbers_lie_nowhere_is_refused() -> None:
    """Those that numpy would make of it are any."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch offers no table of functions")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake, empty = torch.zeros(2, 3), torch.zeros(0, 3)
    for tensor in (fake, torch._efficientzerotensor((2, 3))):
        with pytest.raises(InputError, match="it has no memory, as a fake tensor has none"):
            device_arrays.at_once(tensor)
    assert device_arrays.at_once(empty) is None


@pytest.mark.parametrize("order", list(itertools.product((1, -1), repeat=3)))
def test_the_span_is_from_the_lowest_byte_to_the_highest(order: tuple[int, ...]) -> None:
    memory = np.zeros((4, 5, 6), np.int16)
    array = memory[1:3, ::2, 2:5][tuple(slice(None, None, step) for step in order)]
    value = SimpleNamespace(__cuda_array_interface__=array.__array_interface__)
    span = device_arrays.take(value, 5).span
    assert (span.start, span.stop) == np.lib.array_utils.byte_bounds(array)


def test_what_is_on_no_gpu() -> None:
    assert device_arrays.place(np.zeros(3)) == ("cpu", 0)
    assert device_arrays.place([1.0]) is None
    assert device_arrays.place(SimpleNamespace(__dlpack_device__=lambda: (12, 0))) is None


def test_what_others_have_in_host_memory_is_read_where_it_lies() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0).reshape(2, 3)
    assert device_arrays.from_host(tensor).ctypes.data == tensor.data_ptr()
    with pytest.raises(InputError, match="numpy cannot read it by DLPack"):
        device_arrays.from_host(tensor.bfloat16())


def output(dtype: str, owner: object = None) -> tuple[DeviceOutput, np.ndarray]:
    memory = np.zeros(24, np.uint8)
    array = DeviceArray(address=memory.ctypes.data, dtype=dtype, shape=(2, 3), strides=(1, 2), device=0, owner=owner)
    return DeviceOutput(array), memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int16"])
def test_an_output_is_given_as_it_would_be_taken(dtype: str) -> None:
    made, memory = output(dtype)
    assert device_arrays.place(made) == ("cuda", 0)
    found = device_arrays.take(made, 5)
    assert (found.address, found.dtype, found.shape, found.strides) == (memory.ctypes.data, dtype, (2, 3), (1, 2))
    if dtype == "bfloat16":
        assert not hasattr(made, "__cuda_array_interface__")
    else:
        interface = made.__cuda_array_interface__
        assert np.dtype(interface["typestr"]) == np.dtype(dtype)
        assert interface["data"] == (memory.ctypes.data, False)


def test_an_output_is_exported_without_a_copy_or_not_at_all() -> None:
    made, memory = output("float32")
    for asked in ({"copy": None}, {"copy": False}, {"dl_device": (2, 0), "max_version": (1, 1), "copy": False}):
        assert dlpack.from_capsule(made.__dlpack__(**asked)).address == memory.ctypes.data
    for asked in ({"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (2, 1)}, {"dl_device": (1, 0), "copy": True}):
        with pytest.raises(BufferError, match="an output on a GPU is exported as it is"):
            made.__dlpack__(**asked)
