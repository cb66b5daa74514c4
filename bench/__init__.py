"""Benchmarks; ``python -m bench.NAME`` runs one. Their modules may import the small models of tests/support."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
