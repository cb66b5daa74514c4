"""Find the part of the model that makes each ATen call, or the part whose gradient the call computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode

from nimblec.base.places import SOURCE_KEY, Phase, Place

SetSource: TypeAlias = Callable[[str], None]
"""Called during a run with the part of the model that runs next."""


class SourceTracker:
    """The source of the running call: a module path, what a front end sets, or the gradient of either.

    The path of ``root`` is ``name``. ``failed`` is the innermost module that raised an exception.
    """

    def __init__(self, root: object, name: str = "") -> None:
        self.current = ""
        self.failed = ""
        self._paths: dict[int, str] = {}
        # Keyed by autograd's sequence number.
        self._forward: dict[int, str] = {}
        if isinstance(root, torch.nn.Module):
            self._paths = {id(m): path for path, m in root.named_modules(prefix=name)}

    def set(self, source: str) -> None:
        """Name the part of the model that runs next."""
        self.current = source

    def source(self) -> str:
        """Return the source of the call that is being dispatched; call it once for each, below autograd."""
        gradient: Any = torch._C._current_autograd_node()
        if gradient is not None:
            return str(Place(Phase.BACKWARD, self._forward.get(gradient._sequence_nr(), "")))
        source: str = noted(traceback.get_current_meta()) or self.current
        self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, source)
        return source

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Follow calls of modules inside the block."""
        stack: list[str] = []

        def enter(module: torch.nn.Module, _args: object) -> None:
            stack.append(self.current)
            self.current = self._paths.get(id(module), self.current)

        def leave(_module: torch.nn.Module, _args: object, result: object) -> None:
            if result is None:  # no result yet: an exception passes
                self.failed = self.failed or self.current
            self.current = stack.pop()

        hooks = torch.nn.modules.module
        handles = (
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class SourceNotes(TorchDispatchMode):
    """Makes a tracer of ATen calls note the source of each; `noted` reads it from a node."""

    def __init__(self, sources: SourceTracker) -> None:
        TorchDispatchMode.__init__(self)
        self._sources = sources

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with within(self._sources.source()):
            return func(*args, **(kwargs or {}))


def within(source: str) -> AbstractContextManager[None]:
    """Give calls inside the block this source, whatever module makes them."""
    return traceback.annotate({SOURCE_KEY: str(source)})


def noted(meta: Mapping[str, Any]) -> str | None:
    """Return the source that the ``meta`` of a node got when it was traced; None if it got none."""
    return (meta.get("custom") or {}).get(SOURCE_KEY)


def source_of(node: fx.Node) -> str:
    """Return the origin of a node: an ONNX node, the source noted for it, or the path of its innermost module."""
    if "source" in node.meta:
        return str(node.meta["source"])
    if (source := noted(node.meta)) is not None:
        return source
    innermost = list((node.meta.get("nn_module_stack") or {}).values())[-1:]
    return str(innermost[0][0]) if innermost else ""


class _SourceInterpreter(fx.Interpreter):
    """Runs a graph and reports, before each call, where in the model it came from."""

    def __init__(self, module: fx.GraphModule, set_source: SetSource) -> None:
        super().__init__(module)
        self._set_source = set_source

    def run_node(self, n: fx.Node) -> Any:
        self._set_source(source_of(n))
        return super().run_node(n)


def run_nodes(module: fx.GraphModule, flat_inputs: Sequence[Any], set_source: SetSource) -> Any:
    """Run a graph of ATen calls (an ONNX import, torch.export) on flattened arguments: what it returns."""
    outputs = _SourceInterpreter(module, set_source).run(*flat_inputs, enable_io_processing=False)
    return module.graph.process_outputs(outputs)
