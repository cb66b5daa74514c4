"""The one description of a launch, from which it is run or compiled, and ops that consist of such a launch.

An op of the namespace ``nimblec`` is a call that a graph holds and dispatch modes see. It has a schema,
a ``prepare`` that allocates its results and makes the `Launch` that fills them, and a ``reference``, its
implementation on the CPU. On a GPU the launch is run; on meta tensors it names the kernel to compile;
inference uses the results alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from nimblec.kernels.compiling import Job, load_template

_LIBRARY = torch.library.Library("nimblec", "FRAGMENT")
"""The ops live as long as this module."""

_ALIGNMENT_NBYTES = 16

Results_co = TypeVar("Results_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launch:
    """One launch of ``template`` ("module:function") in ``blocks`` blocks.

    ``pointers`` are tensors and ``settings`` constants, by the names of the template's parameters; settings
    hold Triton's options too (num_warps, num_stages). ``trigger`` is a `nimblec.kernels.gpu.Trigger`: the
    template's TRIGGER, and Triton's launch_pdl follows from it.
    """

    template: str
    blocks: int
    pointers: Mapping[str, Tensor | None]
    settings: Mapping[str, Any]
    trigger: str

    def __call__(self) -> None:
        """Launch on the current stream; imports Triton."""
        load_template(self.template)[self.blocks,](**self.pointers, **self._all_settings())

    @property
    def job(self) -> Job:
        """The job that compiles it; meta tensors will do."""
        dtypes = {name: None if tensor is None else dtype_name(tensor.dtype) for name, tensor in self.pointers.items()}
        unaligned = [name for name, x in self.pointers.items() if x is not None and is_unaligned(x)]
        return Job(template=self.template, pointers=dtypes, settings=self._all_settings(), unaligned=unaligned)

    def _all_settings(self) -> dict[str, Any]:
        """Return ``settings`` and those of the trigger: only a template with TRIGGER waits for the kernel before it."""
        return {**self.settings, "TRIGGER": self.trigger, "launch_pdl": self.trigger != "none"}


@dataclass(frozen=True, slots=True, eq=False)
class Prepared(Generic[Results_co]):
    """Results in new memory, and the launch that writes them."""

    results: Results_co
    launch: Launch


Prepare = Callable[..., Prepared[Any]]

_PREPARES: dict[OpOverload, Prepare] = {}


def define_op(schema: str, *, prepare: Prepare, reference: Callable[..., Any]) -> OpOverload:
    """Return a new op of the namespace ``nimblec``; ``schema`` without it, as in "norm(Tensor x) -> Tensor"."""
    name = schema.partition("(")[0]

    def inferred(*args: Any, **kwargs: Any) -> Any:
        return prepare(*args, **kwargs).results

    def launched(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        prepared.launch()
        return prepared.results

    _LIBRARY.define(schema)
    torch.library.register_fake(f"nimblec::{name}", inferred, lib=_LIBRARY)
    _LIBRARY.impl(name, launched, "CUDA")
    _LIBRARY.impl(name, reference, "CPU")
    op: OpOverload = getattr(torch.ops.nimblec, name).default
    _PREPARES[op] = prepare
    return op


def prepared(op: OpOverload, *args: Any, **kwargs: Any) -> Prepared[Any]:
    """Return the results and the launch of a call of an op, for tensors of any kind; nothing is computed."""
    return _PREPARES[op](*args, **kwargs)


def launch_of(op: OpOverload, *args: Any, **kwargs: Any) -> Launch:
    """Return the launch of a call of an op."""
    return prepared(op, *args, **kwargs).launch


def jobs(nodes: Iterable[fx.Node]) -> list[Job]:
    """Return the jobs that compile the launches among the calls of a graph, each once."""
    found: dict[str, Job] = {}
    for node in nodes:
        if node.target in ops():
            args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), _as_meta)
            job = launch_of(node.target, *args, **kwargs).job
            found.setdefault(repr(job), job)
    return list(found.values())


def _as_meta(node: fx.Node) -> Tensor:
    like = node.meta["val"]
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")


def ops() -> frozenset[OpOverload]:
    """Return all ops that have been defined."""
    return frozenset(_PREPARES)


def is_unaligned(tensor: Tensor) -> bool:
    """Return whether a tensor's first element is not at a multiple of 16 bytes, which Triton would rely on."""
    return bool(tensor.storage_offset() * tensor.element_size() % _ALIGNMENT_NBYTES)


def dtype_name(dtype: torch.dtype) -> str:
    """Return Triton's name of a dtype, such as "float16"."""
    return str(dtype).removeprefix("torch.")
