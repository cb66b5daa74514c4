"""Where in a model the code runs that calls ATen: in which module, and in the gradient of which one's calls."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode

from nimblec.places import SOURCE_KEY, Phase, Place


class SourceTracker:
    """The source of the running call: a module path, what a front end sets, or the gradient of either.

    ``root`` is called ``name``. ``failed`` is the innermost module that an exception passed.
    """

    def __init__(self, root: object, name: str = "") -> None:
        self.current = ""
        self.failed = ""
        self._paths: dict[int, str] = {}
        self._forward: dict[int, str] = {}  # by the number that autograd gave a call
        if isinstance(root, torch.nn.Module):
            self._paths = {id(m): path for path, m in root.named_modules(prefix=name)}

    def set(self, source: str) -> None:
        """Name the part of the model that runs next."""
        self.current = source

    def source(self) -> str:
        """The source of the call that is being dispatched; to be asked once for each, below autograd."""
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
    """Has a tracer of ATen calls note the source of each: `noted` gives that of a node."""

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
    """Calls inside the block are of this source, whatever module makes them."""
    return traceback.annotate({SOURCE_KEY: str(source)})


def noted(meta: Mapping[str, Any]) -> str | None:
    """The source that a node was given when it was traced, out of its ``meta``; None for one that was given none."""
    return (meta.get("custom") or {}).get(SOURCE_KEY)


def source_of(node: fx.Node) -> str:
    """The ONNX node, the source that was noted, or the path of the innermost module, that a node came from."""
    if "source" in node.meta:
        return str(node.meta["source"])
    if (source := noted(node.meta)) is not None:
        return source
    innermost = list((node.meta.get("nn_module_stack") or {}).values())[-1:]
    return str(innermost[0][0]) if innermost else ""
