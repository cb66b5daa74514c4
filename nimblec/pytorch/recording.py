"""Record a module that already makes plain ATen calls, such as a traced training step, without torch.export.

Its calls run once: functionalization makes those in place functional, and the recorder below it writes them down.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.recorder import InPlaceError
from nimblec.pytorch.aten_graph import AtenProgram, StridedRecorder, program
from nimblec.pytorch.export_errors import exporting
from nimblec.pytorch.source_tracker import noted


def record(module: torch.nn.Module, args: Sequence[Any], *, device: str) -> AtenProgram:
    """Record a module, which may make only ATen calls where it is exported, as `aten_graph.trace` would.

    Each call has the source noted for it. Raises TraceError where a call cannot be recorded, UnsupportedModelError
    where it draws random numbers or writes into an argument.
    """
    name, recorder = type(module).__name__, _NotingRecorder(torch.device(device))
    given: list[Tensor] = []

    def functional(leaf: Tensor) -> Tensor:
        given.append(torch._to_functional_tensor(recorder.receive(f"input_{len(given)}", leaf)))
        return given[-1]

    with exporting(name, "the recorder"), torch.no_grad(), recorder:
        arguments = pytree.tree_map_only(Tensor, functional, tuple(args))
        with _functionalized(), _as_exported(), _TopLevel(recorder.device):
            values = module(*arguments)
        _refuse_written(name, given)
        leaves, structure = pytree.tree_flatten(pytree.tree_map_only(Tensor, _plain, values))
    return program(recorder, leaves, structure)


@contextmanager
def _functionalized() -> Iterator[None]:
    """Make calls in place on functional tensors functional; the call of a view stays one."""
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


@contextmanager
def _as_exported() -> Iterator[None]:
    """Have modules run as torch.export would run them."""
    before = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = before


def _refuse_written(name: str, given: Sequence[Tensor]) -> None:
    for number, tensor in enumerate(given):
        is_written = torch._functionalize_has_data_mutation(tensor)  # type: ignore[attr-defined]
        if is_written or torch._functionalize_has_metadata_mutation(tensor):
            raise UnsupportedModelError(
                f"{name} writes into its input {f'input_{number}'!r}: give it a copy, or compile it at -O0"
            )


def _plain(tensor: Tensor) -> Tensor:
    """Return the plain tensor of a functional one, with all that was written into it."""
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
    return torch._from_functional_tensor(tensor)


class _TopLevel(TorchFunctionMode):
    """Prepares calls of operators for functionalization.

    Those whose schema does not declare what they write (``native_batch_norm``) are replaced by those that do. What
    depends on no argument of the model is computed on the host, whatever device the call names.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if DispatchKey.CompositeImplicitAutograd in func.py_kernels:
            with self:
                return func.decompose(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.device) for leaf in leaves):
            device = self._device if any(map(_is_of_model, leaves)) else torch.device("cpu")
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: device, (args, kwargs))
        return func(*args, **kwargs)


def _is_of_model(leaf: Any) -> bool:
    """Return whether it is a tensor that stands for a value of the running model."""
    return isinstance(leaf, Tensor) and isinstance(_held(leaf), FakeTensor)


def _held(tensor: Tensor) -> Tensor:
    return torch._from_functional_tensor(tensor) if torch._is_functional_tensor(tensor) else tensor


class _NotingRecorder(StridedRecorder):
    """A recorder below functionalization, which takes sources from what is noted for calls, and constants anywhere."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._on_host: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.source = noted(traceback.get_current_meta()) or ""
        args, kwargs = pytree.tree_map_only(Tensor, self._hosted, (args, dict(kwargs or {})))
        if func._schema.is_mutable and not isinstance(args[0], FakeTensor):
            raise InPlaceError(f"{func} in {self.source or 'the model'} writes into a constant")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _hosted(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host of a constant of another device."""
        if isinstance(tensor, FakeTensor) or tensor.device.type == "cpu":
            return tensor
        kept = self._on_host.setdefault(id(tensor), (tensor, tensor.detach().cpu()))
        return kept[1]
