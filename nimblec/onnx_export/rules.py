"""The rewrite rules of onnxscript's optimiser, each tried only at operators with which its pattern ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onnxscript.rewriter._rewrite_rule import RewriteRule


@contextmanager
def rules_by_operator() -> Iterator[None]:
    """Make onnxscript's optimiser skip the rules that begin to match at another operator: they cannot apply.

    It tries each rule at each node, and for a pattern of several outputs lists all nodes of the graph first.
    """
    before = RewriteRule.try_rewrite

    def try_rewrite(rule: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if not rule._target_pattern.output_nodes[0].op.matches(node.op_type):
            return None
        return before(rule, model, graph, node, **options)

    RewriteRule.try_rewrite = try_rewrite  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        RewriteRule.try_rewrite = before  # type: ignore[method-assign]
