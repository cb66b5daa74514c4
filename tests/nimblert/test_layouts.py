"""Copies between layouts: what the gather kernel is told, by a reference that does the same."""

import itertools
import struct
from collections.abc import Sequence
from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nimblert.arrays.layouts import Gather, element_strides, gather, has_gaps, in_memory_order, is_dense, overlaps
from nimblert.cuda import movers

SHAPES = st.lists(st.integers(1, 5), max_size=5)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without holes whose axis ``order[-1]`` is the innermost."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def gathered(found: Gather, memory: np.ndarray) -> list[int]:
    """Gather as the kernel of layout.cu does."""
    steps = (
        range(0, size * stride, stride) if stride else [0] * size
        for size, stride in zip(found.sizes, found.strides, strict=True)
    )
    return [int(memory[sum(place)]) for place in itertools.product(*steps)]


@given(st.data())
def test_a_gather_fills_any_dense_layout_from_any_strided_one(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    axes = range(len(shape))
    to = dense_strides(shape, data.draw(st.permutations(axes)))
    source = dense_strides(shape, data.draw(st.permutations(axes)))
    spread = data.draw(st.sampled_from((1, 2, 3)))
    source = tuple(stride * spread for stride in source)
    found = gather(shape, to, source)
    assert found is not None
    count = int(np.prod(shape))
    memory = np.arange(count * spread)
    view = np.lib.stride_tricks.as_strided(memory, shape, [8 * stride for stride in source])
    expected = np.zeros(count, np.int64)
    np.lib.stride_tricks.as_strided(expected, shape, [8 * stride for stride in to])[...] = view
    assert gathered(found, memory) == expected.tolist()
    assert found.count == count
    assert found.is_copy == (count == 1 or (spread == 1 and expected.tolist() == list(range(count))))


def test_axes_that_lie_side_by_side_are_one() -> None:
    nhwc, nchw = (3 * 8 * 9, 1, 9 * 3, 3), (3 * 8 * 9, 8 * 9, 9, 1)
    assert gather((2, 3, 8, 9), nhwc, nchw) == Gather((2, 72, 3), (216, 1, 72))
    assert gather((2, 3, 8, 9), nhwc, nhwc) == Gather((432,), (1,))
    assert gather((1, 3, 8, 9), nhwc, nchw) == Gather((72, 3), (1, 72))
    assert gather((4, 5), (5, 1), (0, 1)) == Gather((4, 5), (0, 1))
    assert gather((), (), ()) == Gather((1,), (1,))


def test_what_a_kernel_cannot_do_is_left_to_the_host() -> None:
    assert gather((4, 4), (8, 1), (4, 1)) is None
    assert gather((4, 4), (0, 1), (4, 1)) is None
    many = (2,) * 10
    strides = dense_strides(many, range(10))
    assert gather(many, strides, strides) is not None
    assert gather(many, strides, dense_strides(many, [*range(0, 10, 2), *range(9, 0, -2)])) is None


def test_a_kernel_counts_in_32_bits() -> None:
    """A thread adds the threads of the grid to the last element that it copies, before it sees that there are none."""
    height, grid = 1 << 16, movers._BLOCK * movers._MOST_BLOCKS
    width = (1 << 16) - grid // height
    most = gather((height, width), (width, 1), (1, height))
    assert most is not None
    assert most.count + grid == 1 << 32
    assert gather((height, width + 1), (width + 1, 1), (1, height)) is None


def test_plain_copies_are_of_any_size() -> None:
    shape, strides = (1 << 17, 1 << 16), (1 << 16, 1)
    whole = gather(shape, strides, strides)
    assert whole == Gather((1 << 33,), (1,))
    (step,) = movers._GatherMover(None, whole, 2).steps(4096, 512)
    assert isinstance(step, partial)
    assert step.keywords == {"dst": 4096, "src": 512, "nbytes": 1 << 34}


def test_the_struct_is_the_kernels() -> None:
    found = struct.unpack("<QQII8I8q", Gather((2, 3), (-1, 7)).parameters(4096, 512))
    assert found == (4096, 512, 6, 2, 2, 3, *(0,) * 6, -1, 7, *(0,) * 6)
    assert len(Gather((1,), (1,)).parameters(0, 0)) == 120


@given(SHAPES.filter(bool), st.data())
def test_memory_order_is_a_view_of_all_elements(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    memory = np.arange(np.prod(shape))
    array = np.lib.stride_tricks.as_strided(memory, shape, [8 * stride for stride in dense_strides(shape, order)])
    assert is_dense(shape, element_strides(array))
    assert is_dense(shape, array.strides, 8)
    flat = in_memory_order(array)
    assert np.shares_memory(flat, memory)
    assert flat.tolist() == memory.tolist()


def test_a_field_of_records_is_not_dense() -> None:
    records = np.zeros(4, [("a", np.float32), ("b", np.uint16)])
    for field in (records["a"], records["b"]):
        assert not is_dense(field.shape, field.strides, field.itemsize)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=4))
def test_has_gaps_finds_bytes_that_belong_to_no_element(axes: list[tuple[int, int]]) -> None:
    shape, strides = [size for size, _ in axes], [stride for _, stride in axes]
    steps = (range(0, size * stride, stride) if stride else [0] * size for size, stride in axes)
    used = {sum(place) for place in itertools.product(*steps)}
    assert has_gaps(shape, strides) == (used != set(range(max(used, default=-1) + 1)))


def test_elements_that_are_not_there_share_no_memory() -> None:
    assert not overlaps((4, 0), (0, 0))
    assert overlaps((4, 2), (0, 1))
