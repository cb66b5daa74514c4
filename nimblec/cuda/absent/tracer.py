"""A run on tensors without data, whose launches become the tasks of a graph."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nimblec.base.errors import UnsupportedModelError, first_line
from nimblec.base.ir import Access, CopyWork, FillWork, Graph, Op, Task, TensorView
from nimblec.cuda.absent.buffers import BufferTable
from nimblec.cuda.absent.code import Code, CodeTable
from nimblec.cuda.absent.inductor import seeing_launches
from nimblec.graph import control
from nimblec.graph.rewriter import constant_of
from nimblec.graph.state import slots
from nimblec.graph.vocabulary import ALLOCATIONS
from nimblec.graph.writes import written_positions
from nimblec.kernels.gpu import GPU
from nimblec.kernels.launch import ops, prepared
from nimblec.kernels.products.parts import IMPLEMENTATIONS
from nimblec.optimize.passes import inductor
from nimblec.pytorch.model import TorchModel
from nimblec.pytorch.outputs import name_outputs
from nimblec.pytorch.state import scratch_storages
from nimblert.plan import Dim3

aten = torch.ops.aten

_COPIES = frozenset({aten.clone.default, aten.copy_.default})
"""Calls that generated code may be surrounded by, where it lays out a result otherwise than was inferred."""

_FILLS: dict[Any, int | None] = {
    aten.zeros.default: None,
    aten.new_zeros.default: None,
    aten.zeros_like.default: None,
    aten.zero_.default: None,
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.fill_.Scalar: 1,
    aten.new_full.default: 2,
}
"""Calls that fill memory, and the position of the number among their arguments; None for zero."""

_LARGEST_FILL_NBYTES = 4
"""The largest element of a fill."""


class Tracer(TorchDispatchMode):
    """Sees each call of a run: our kernels and generated code become launches, other calls are generated alone.

    Entered inside a `FakeTensorMode`. ``source`` names the part of the model that runs.
    """

    def __init__(self, gpu: GPU, buffers: BufferTable) -> None:
        TorchDispatchMode.__init__(self)
        self._code = CodeTable(gpu)
        self._buffers = buffers
        self._ops: list[Op] = []
        self._tasks: list[Task] = []
        self._generated: dict[str, Callable[..., Any]] = {}
        self._inside = ""
        self._follows_kernel = False
        self.source = ""

    def set_source(self, source: str) -> None:
        """Name the part of the model that runs next."""
        self.source = source

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            return self._run(func, args, kwargs or {})
        except RuntimeError as exc:
            if self._inside:
                raise
            # torch has begun to look for the GPU.
            raise UnsupportedModelError(self.refusal(str(func))) from exc

    def _run(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in ops():
            with self:
                made = prepared(func, *args, **kwargs)
            self._launch_template(func, args, kwargs, made)
            return made.results
        if func in IMPLEMENTATIONS:
            with self:
                return IMPLEMENTATIONS[func](*args)
        if func in inductor.COMPILED:
            return self._run_generated(str(func), inductor.COMPILED[func], args)
        if "device" in kwargs:
            # The model was recorded on the CPU.
            kwargs = {**kwargs, "device": torch.device("cuda")}
        result = func(*args, **kwargs)
        if func in ALLOCATIONS or _is_view(func) or not _has_tensors(result) or self._moves(func, args, result):
            return result
        if self._inside and (func not in _COPIES or self._inside == str(func)):
            raise UnsupportedModelError(self.refusal(self._inside))
        return self._generate(func, args, kwargs, result)

    def graph(self, inputs: tuple[TensorView, ...], outputs: tuple[TensorView, ...]) -> Graph:
        """Return what was seen as a graph."""
        return Graph(
            modules=tuple(self._code.modules),
            kernels=tuple(self._code.kernels),
            buffers=self._buffers.buffers(access.buffer for task in self._tasks for access in task.writes),
            ops=tuple(self._ops),
            tasks=tuple(self._tasks),
            inputs=inputs,
            outputs=outputs,
        )

    def _launch_template(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Add the launch of one of our kernels: it reads the op's arguments, and writes its results and the rest."""
        launch = made.launch
        code = self._code.of_job(launch.job)
        positions = written_positions(func, args)
        formals = func._schema.arguments
        given = {formal.name: value for formal, value in zip(formals, args, strict=False)} | dict(kwargs)
        written = [made.results, *(given.get(formals[at].name) for at in positions)]
        read = [given.get(formal.name) for at, formal in enumerate(formals) if at not in positions]
        known = {t.untyped_storage()._cdata for t in pytree.tree_leaves((read, written)) if isinstance(t, torch.Tensor)}
        own = [t for t in launch.pointers.values() if t is not None and t.untyped_storage()._cdata not in known]
        self._add(str(func), code, launch.pointers, (launch.blocks, 1, 1), [*read, *own], [*written, *own])

    def _run_generated(self, name: str, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        outer, self._inside = self._inside, name
        try:
            with seeing_launches(self._seen), self:
                return run(*args)
        finally:
            self._inside = outer

    def _seen(
        self,
        name: str,
        compiled: Any,
        given: dict[str, Any],
        grid: Dim3,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        self._add(name, self._code.add(compiled), given, grid, reads, writes)

    def _generate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], like: Any) -> Any:
        """Run a call, whose results are ``like`` these, as code that Inductor generates for it alone."""
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        described = [_described(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
        key = f"{func} {structure} {described}"
        several = isinstance(like, (tuple, list))
        if key not in self._generated:
            graph = fx.Graph()
            places = [
                graph.placeholder(f"input_{n}") if isinstance(leaf, torch.Tensor) else leaf
                for n, leaf in enumerate(leaves)
            ]
            call_args, call_kwargs = pytree.tree_unflatten(places, structure)
            call = graph.call_function(func, call_args, call_kwargs)
            parts = [graph.call_function(operator.getitem, (call, n)) for n in range(len(like))] if several else [call]
            graph.output(() if func._schema.is_mutable else tuple(parts))
            with _disable_current_modes():
                self._generated[key] = inductor.compile_graph(fx.GraphModule({}, graph), tensors)
        results = self._run_generated(str(func), self._generated[key], [list(tensors)])
        if func._schema.is_mutable:
            return like
        return type(like)(results) if several else results[0]

    def refusal(self, call: str) -> str:
        """Return the sentence for a call for which no kernel can be generated."""
        where = f" in {self.source}" if self.source else ""
        return (
            f"{call}{where}: only a library's kernel computes it, and a plan for a GPU that is not here has none: "
            "compile it on the GPU, by --target cuda"
        )

    def _moves(self, func: Any, args: Sequence[Any], result: Any) -> bool:
        """Add a copy or fill as a command, if the call is one of tensors alike and without gaps."""
        if func in _FILLS:
            return self._fills(str(func), result, 0 if _FILLS[func] is None else args[_FILLS[func] or 0])
        if func not in _COPIES:
            return False
        target, source = (result, args[0]) if func is aten.clone.default else args[:2]
        if not _lie_alike(target, source):
            return False
        (dst,), (src,) = self._buffers.accesses(target), self._buffers.accesses(source)
        self._task(str(func), CopyWork(dst=dst, src=src), (src,), (dst,))
        return True

    def _fills(self, name: str, target: torch.Tensor, number: Any) -> bool:
        if not _lie_alike(target, target) or target.element_size() > _LARGEST_FILL_NBYTES:
            return False
        with _disable_current_modes():
            value = int.from_bytes(torch.full((1,), number, dtype=target.dtype).view(torch.uint8).numpy(), "little")
        (dst,) = self._buffers.accesses(target)
        self._task(name, FillWork(dst=dst, value=value, element_nbytes=target.element_size()), (), (dst,))
        return True

    def _add(
        self,
        name: str,
        code: Code,
        given: Mapping[str, Any],
        grid: Dim3,
        reads: Any,
        writes: Any,
    ) -> None:
        work = self._code.work(code, given, grid, self._buffers.place)
        pointed = {reference.buffer for reference in work.references}
        written = dict.fromkeys(a for a in self._buffers.accesses(writes) if a.buffer in pointed)
        read = dict.fromkeys(a for a in self._buffers.accesses(reads) if a.buffer in pointed)
        before = len(self._tasks) - 1 if code.is_programmatic and self._follows_kernel else None
        self._task(name, work, tuple(read), tuple(written), before)
        self._follows_kernel = True

    def _task(
        self, name: str, work: Any, reads: tuple[Access, ...], writes: tuple[Access, ...], after: int | None = None
    ) -> None:
        self._tasks.append(Task(op=len(self._ops), work=work, reads=reads, writes=writes, programmatic_after=after))
        self._ops.append(Op(name=name, source=self.source))
        self._follows_kernel = False


def _has_tensors(result: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result))


def _is_view(func: Any) -> bool:
    return not func._schema.is_mutable and any(result.alias_info for result in func._schema.returns)


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype and strides, and no gaps."""
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()) or not a.numel():
        return False
    return 1 + sum((size - 1) * stride for size, stride in zip(a.shape, a.stride(), strict=True)) == a.numel()


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def trace(model: TorchModel, gpu: GPU) -> Graph:
    """Return the graph of a flat model on real tensors of the CPU, as it would run on ``gpu``.

    Raises UnsupportedModelError for a call that only a library computes.
    """
    if model.cropped or any(control.calls(model.module)):
        raise UnsupportedModelError(
            "a plan for a GPU that is not here holds no loops, branches or sizes that depend on values: compile it on "
            "the GPU, by --target cuda"
        )
    buffers, mode = BufferTable(), FakeTensorMode()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    module = _on_the_gpu(model.module, buffers, moved)
    args = tuple(map(moved, model.args))
    named = zip(model.inputs, args, strict=False)
    inputs = tuple(buffers.add_input(name, tensor, example) for (name, example), tensor in named)
    for slot, tensor in zip(slots(model.module).values(), args[len(inputs) :], strict=True):
        buffers.add_constant(tensor, slot.tensor, slot.name, is_state=True)
    tracer = Tracer(gpu, buffers)
    try:
        with torch.no_grad(), mode, tracer:
            result = replace(model, module=module, args=args).run(tracer.set_source)
    except UnsupportedModelError as exc:
        # torch.fx adds the node to the message.
        raise UnsupportedModelError(first_line(exc)) from exc
    except RuntimeError as exc:
        raise UnsupportedModelError(tracer.refusal("a call")) from exc
    outputs = tuple(buffers.add_output(name, tensor) for name, tensor in name_outputs(result))
    return tracer.graph(inputs, outputs)


def _on_the_gpu(
    module: fx.GraphModule, buffers: BufferTable, moved: Callable[[torch.Tensor], torch.Tensor]
) -> fx.GraphModule:
    """Return a copy of a module whose constants are on the GPU, without their values, which ``buffers`` get."""
    scratch = scratch_storages(module)
    module = fx.GraphModule(module, module.graph)
    known: dict[str, torch.Tensor] = {}
    by_value: dict[int, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in known:
            value = constant_of(module, node)
            if id(value) not in by_value:
                by_value[id(value)] = moved(value)
                is_scratch = value.untyped_storage()._cdata in scratch
                buffers.add_constant(by_value[id(value)], value, "" if is_scratch else name, is_state=is_scratch)
            known[name] = by_value[id(value)]
    for name, tensor in known.items():
        parent, _, last = name.rpartition(".")
        delattr(module.get_submodule(parent), last)
        setattr(module.get_submodule(parent), last, tensor)
    return module
