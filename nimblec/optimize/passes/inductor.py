"""Regions compiled by Inductor: Triton kernels on a GPU, C++ on the CPU; each region is one op.

Dispatch modes see an op as one call with the tensors that it reads and returns; whatever the generated
code allocates and launches belongs to it.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from nimblec.graph.rewriter import argument, fake
from nimblec.graph.views import is_view, lies_as, with_strides
from nimblec.optimize.passes.partition import Extract

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it imports itself
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

OPTIONS: Mapping[str, Any] = {
    "keep_output_stride": True,
    "comprehensive_padding": False,  # torch 2.11: sums of an adaptive pooling's rows would read the padding
    "fx_graph_cache": True,
    "triton.cudagraphs": False,
    "triton.unique_kernel_names": True,
    "cpp_wrapper": False,
}
"""Inductor's settings: results have eager's strides; kernels are named after the calls that they fuse."""

_RESIZED = [torch.ops.aten.upsample_bilinear2d, torch.ops.aten.upsample_bicubic2d, torch.ops.aten.upsample_trilinear3d]
"""Calls that torch decomposes while it traces autograd, so that Inductor's own table lacks them."""

REFUSAL = RuntimeError
"""What Inductor raises for a region that it cannot compile; its own errors and NotImplementedError derive from it."""

Compiled = Callable[[list[Tensor]], Sequence[Tensor]]

device: ContextVar[str | None] = ContextVar("device", default=None)
"""The device to generate code for, where it is not that of the graph."""

COMPILED: dict[OpOverload, Callable[..., list[Tensor]]] = {}
"""The functions that compute the regions' ops."""

_LIBRARY = torch.library.Library("nimblec", "FRAGMENT")
"""The namespace of the ops, which live as long as the process."""


def ops(extracts: Sequence[Extract]) -> dict[OpOverload, list[Extract]]:
    """Return the regions by the op that computes them: equal regions share one.

    A region that Inductor refuses is left out.
    """
    named: dict[str, list[Extract]] = {}
    for extracted in extracts:
        named.setdefault(_name(extracted), []).append(extracted)
    _define({name: equal[0] for name, equal in named.items() if not _is_defined(name)})
    return {_op(name): equal for name, equal in named.items() if _is_defined(name)}


def signature(extracted: Extract) -> str:
    """Return a text that is equal for equal regions: calls, arguments, and dtypes, shapes and strides of the inputs."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in extracted.module.graph.nodes:
        names[node] = f"%{len(names)}"
        arguments = fx.map_arg((node.args, node.kwargs), names.__getitem__)
        described = _described(node.meta["val"]) if node.op == "placeholder" else ""
        called = node.target if node.op == "call_function" else node.op
        lines.append(f"{names[node]} = {called} {arguments} {described}")
    return "\n".join(lines)


def _described(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"


def _name(extracted: Extract) -> str:
    """Return the name of a region's op: equal for equal regions."""
    text = signature(extracted) + repr(sorted(OPTIONS.items()))
    return f"{_title(extracted)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _is_defined(name: str) -> bool:
    return hasattr(torch.ops.nimblec, name)


def _op(name: str) -> OpOverload:
    overload: OpOverload = getattr(torch.ops.nimblec, name).default
    return overload


def _define(extracts: Mapping[str, Extract]) -> None:
    """Compile regions in parallel and define an op for each, except for those that Inductor refuses."""
    begun = {}
    for name, extracted in extracts.items():
        with suppress(REFUSAL), _kernels_in_background() as finish:
            begun[name] = _compile(extracted), finish
    for name, (compiled, finish) in begun.items():
        try:
            finish()
        except REFUSAL:
            continue
        _register(name, compiled, extracts[name])


@contextmanager
def _kernels_in_background() -> Iterator[Callable[[], None]]:
    """Compile the kernels of code that is generated inside the block in the background, in Inductor's processes.

    The context is a function that waits for them; only then may the code run.
    """
    waits: list[Callable[[], None]] = []
    wait = AsyncCompile.wait

    def later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        waits.append(lambda: wait(self, scope))

    def finish() -> None:
        for each in waits:
            each()

    AsyncCompile.wait = later  # type: ignore[method-assign]
    try:
        yield finish
    finally:
        AsyncCompile.wait = wait  # type: ignore[method-assign]


def _title(extracted: Extract) -> str:
    """Return the names of a region's first calls, as Inductor names its kernels."""
    targets = [n.target for n in extracted.module.graph.nodes if isinstance(n.target, OpOverload) and not is_view(n)]
    names = dict.fromkeys(target._schema.name.partition("::")[2].strip("_") for target in targets)
    return "_".join(["fused", *list(names)[:4]])


def _compile(extracted: Extract) -> Compiled:
    """Generate code for a region."""
    inputs, outputs = list(map(fake, extracted.inputs)), list(map(fake, extracted.outputs))
    return compile_graph(extracted.module, inputs, [tuple(output.stride()) for output in outputs])


def compile_graph(
    module: fx.GraphModule, like: Sequence[Tensor], strides: Sequence[tuple[int, ...]] | None = None
) -> Compiled:
    """Generate code for a graph on inputs like these, whose results have ``strides``, or those that are inferred."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # Inductor's cache asks for an environment
    inputs = [_like(tensor, mode) for tensor in like]
    with torch.no_grad(), config.patch(dict(OPTIONS)):
        with mode:
            table = select_decomp_table() | get_decompositions(_RESIZED)
            decomposed = make_fx(module, decomposition_table=table)(*inputs)
        output = decomposed.graph.output_node()
        results = tuple(argument(output, 0))
        output.args = (results,)
        output.meta["user_visible_output_idxs"] = list(range(len(results)))
        output.meta["original_output_strides"] = strides or [tuple(fake(node).stride()) for node in results]
        with V.set_fake_mode(mode), tracing(TracingContext(mode)):
            compiled: Compiled = compile_fx_inner(decomposed, inputs)
    return compiled


def _like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        on = device.get() or tensor.device
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=on)


def _register(name: str, compiled: Compiled, extracted: Extract) -> None:
    """Define the op of a compiled region; all its results are new memory, and it writes only its state."""
    expected = [tuple(fake(node).stride()) for node in extracted.inputs]
    results = [fake(node) for node in extracted.outputs]
    described = [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in results]

    written = {extracted.inputs.index(state) for state in extracted.written}

    def run(inputs: list[Tensor], state: Sequence[Tensor] = ()) -> list[Tensor]:  # noqa: ARG001 - of the inputs
        with torch.no_grad():
            assert all(inputs[number].stride() == expected[number] for number in written), name
            laid = [_with_strides(t, strides) for t, strides in zip(inputs, expected, strict=True)]
            results = _separate(compiled(laid), inputs)
            for tensor, (shape, _, dtype, _) in zip(results, described, strict=True):
                assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
            return [_with_strides(t, strides) for t, (_, strides, *_) in zip(results, described, strict=True)]

    def infer(inputs: list[Tensor], state: Sequence[Tensor] = ()) -> list[Tensor]:  # noqa: ARG001 - static shapes
        return [torch.empty_strided(shape, strides, dtype=dtype, device=on) for shape, strides, dtype, on in described]

    state = ", Tensor(a!)[] state" if written else ""
    _LIBRARY.define(f"{name}(Tensor[] inputs{state}) -> Tensor[]")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nimblec::{name}", infer, lib=_LIBRARY)
    COMPILED[_op(name)] = run


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the tensor with the strides that were inferred: some calls, and generated code, lay out results otherwise.

    Strides of axes of length 1 do not matter, and cost no copy.
    """
    if tensor.stride() != strides and lies_as(tensor, strides):
        return tensor.as_strided(tensor.shape, strides)
    return with_strides(tensor, strides)


def _separate(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Give each result its own memory: generated code returns equal results once, and inputs as they are."""
    taken = {tensor.untyped_storage()._cdata for tensor in inputs}
    separate = []
    for result in results:
        own = result if result.untyped_storage()._cdata not in taken else result.clone()
        taken.add(own.untyped_storage()._cdata)
        separate.append(own)
    return separate
