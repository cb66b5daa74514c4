"""Run a model that is an FX graph of ATen calls (an ONNX import, torch.export) node by node."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import fx

from nimblec.pytorch.source_tracker import source_of

SetSource: TypeAlias = Callable[[str], None]
"""Called during a run with the part of the model that runs next."""


class _SourceInterpreter(fx.Interpreter):
    """Runs a graph and reports, before each call, where in the model it came from."""

    def __init__(self, module: fx.GraphModule, set_source: SetSource) -> None:
        super().__init__(module)
        self._set_source = set_source

    def run_node(self, n: fx.Node) -> Any:
        self._set_source(source_of(n))
        return super().run_node(n)


def run_nodes(module: fx.GraphModule, flat_inputs: Sequence[Any], set_source: SetSource) -> Any:
    """Run ``module`` on flattened arguments: what it returns."""
    outputs = _SourceInterpreter(module, set_source).run(*flat_inputs, enable_io_processing=False)
    return module.graph.process_outputs(outputs)
