"""Copy the sources noted for calls to the ONNX nodes that torch.onnx.export makes of them."""

import ast
from typing import Any

from nimblec.base.places import SOURCE_KEY
from nimblec.pytorch.source_tracker import noted

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of a node: the modules around the call that it comes from, and last the name of that call."""


def keep_sources(program: Any) -> None:
    """Write the source of each node of an exported program into its metadata, where one was noted."""
    calls = program.exported_program.graph.nodes
    sources = {call.name: source for call in calls if (source := noted(call.meta))}
    for node in program.model.graph if sources else ():
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "()"))
        if scopes and scopes[-1] in sources:
            node.metadata_props[SOURCE_KEY] = sources[scopes[-1]]
