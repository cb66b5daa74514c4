"""What the capture process begins on threads of its own while it imports torch."""

from tests import subprocesses

BEGIN_AND_WAIT = """
import sys
from nimblec.cuda import ahead
for thread in ahead.begin():
    thread.join()
print(*(name for name in ("scipy.sparse.csgraph", "sympy", "networkx") if name in sys.modules))
"""

BEGIN_AND_IMPORT = """
from nimblec.cuda import ahead
ahead.begin()
import torch._inductor.compile_fx
import nimblec.planning, sympy, networkx
print(sympy.Integer(2) + 2, networkx.path_graph(4).number_of_nodes())
"""


def test_none_of_it_needs_torch() -> None:
    imported = subprocesses.python(BEGIN_AND_WAIT, without=["torch"])
    assert imported.split() == ["scipy.sparse.csgraph", "sympy", "networkx"]


def test_it_is_imported_beside_torch() -> None:
    assert subprocesses.python(BEGIN_AND_IMPORT).split() == ["4", "4"]


def test_what_is_not_installed_is_left_to_who_needs_it() -> None:
    imported = subprocesses.python(BEGIN_AND_WAIT, without=["networkx", "triton"])
    assert imported.split() == ["scipy.sparse.csgraph", "sympy"]
