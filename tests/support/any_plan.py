"""Arbitrary plans for hypothesis, which fit the file format and mean nothing."""

from collections.abc import Callable

from hypothesis import strategies as st

from nimblert.plan import (
    Access,
    Candidate,
    Crop,
    Device,
    Fit,
    Golden,
    GoldenOutput,
    Kernel,
    Launch,
    Memcpy,
    Memset,
    Module,
    Op,
    Parameter,
    ParameterKind,
    Plan,
    Pointer,
    Program,
    Record,
    Region,
    Relocation,
    Role,
    ScheduleRecord,
    Target,
    Tensor,
    Wait,
    Weight,
)

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
i64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(max_size=8)
as_view: Callable[[bytes], memoryview] = memoryview
data = st.binary(max_size=40).map(as_view)
dim3 = st.tuples(u32, u32, u32)
number = st.floats(allow_nan=False)


def several(items: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(items, max_size=3).map(tuple)


pointers = st.builds(Pointer, region=st.sampled_from(Region), index=u32, offset=i64)
accesses = several(st.builds(Access, pointer=pointers, nbytes=u64))
tensors = st.builds(
    Tensor,
    name=text,
    dtype=text,
    shape=several(i64),
    strides=several(i64),
    pointer=pointers,
    sample_range=st.none() | st.tuples(i64, i64),
    mask=st.booleans(),
)
weights = st.builds(
    Weight, name=text, dtype=text, shape=several(i64), offset=u64, data=data, sha256=st.binary(max_size=32)
)
parameters = st.builds(
    Parameter, offset=u32, nbytes=u32, kind=st.sampled_from(ParameterKind), name=text, dtype=text, shape=several(i64)
)
kernels = st.builds(
    Kernel,
    module=u32,
    symbol=text,
    parameters=several(parameters),
    max_dynamic_smem_nbytes=u32,
    non_portable_cluster=st.booleans(),
)
launches = st.builds(
    Launch,
    stream=u32,
    op=u32,
    kernel=u32,
    params=st.binary(max_size=20),
    relocations=several(st.builds(Relocation, param_offset=u32, pointer=pointers)),
    reads=accesses,
    writes=accesses,
    grid=dim3,
    block=dim3,
    cluster=dim3,
    dynamic_smem_nbytes=u32,
    cooperative=st.booleans(),
    programmatic=st.booleans(),
    duration_ns=u64,
)
commands = st.one_of(
    launches,
    st.builds(Memcpy, stream=u32, op=u32, dst=pointers, src=pointers, nbytes=u64, duration_ns=u64),
    st.builds(Memset, stream=u32, op=u32, dst=pointers, value=u32, element_nbytes=u8, count=u64, duration_ns=u64),
    st.builds(Crop, stream=u32, op=u32, output=u32, sizes=pointers, rank=u32, duration_ns=u64),
    st.builds(Record, stream=u32, event=u32),
    st.builds(Wait, stream=u32, event=u32),
)
goldens = st.builds(
    Golden,
    seed=u64,
    tolerance=number,
    outputs=several(st.builds(GoldenOutput, sha256=st.binary(max_size=32), samples=several(number))),
)
candidates = st.builds(Candidate, policy=text, stream_count=u32, sync_count=u32, arena_nbytes=u64, duration_ns=u64)
schedules = st.builds(
    ScheduleRecord,
    policy=text,
    antichain=several(u32),
    arena_lower_bound_nbytes=u64,
    fewest_sync_count=u32,
    candidates=several(candidates),
)
programs = st.builds(
    Program,
    name=text,
    inputs=several(tensors),
    outputs=several(tensors),
    input_nbytes=several(u64),
    output_nbytes=several(u64),
    arena_nbytes=u64,
    stream_count=u32,
    event_count=u32,
    ops=several(st.builds(Op, name=text, source=text)),
    commands=several(commands),
    golden=st.none() | goldens,
    schedule=st.none() | schedules,
    entry=text,
    profile=several(st.tuples(text, u64)),
    role=st.sampled_from(Role),
    fits=several(st.sampled_from(Fit)),
)
any_plan = st.builds(
    Plan,
    producer=text,
    versions=several(st.tuples(text, text)),
    target=st.sampled_from(Target),
    device=st.builds(
        Device, name=text, compute_capability=st.tuples(u16, u16), multiprocessor_count=u32, driver_version=u32
    ),
    modules=several(st.builds(Module, origin=text, code=data)),
    kernels=several(kernels),
    weights_nbytes=u64,
    weights=several(weights),
    state_nbytes=u64,
    state=several(weights),
    programs=several(programs),
    refits=several(programs),
)
