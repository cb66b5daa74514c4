"""docs/security.md names tests and limits that there are."""

import re
from dataclasses import asdict

from subprocesses import ROOT

from nimblert.plan.records import DEFAULT_LIMITS

TEXT = (ROOT / "docs" / "security.md").read_text()


def test_every_test_and_module_that_it_names_is_there() -> None:
    file = ""
    named = re.findall(r"`(\w+/test_\w+\.py)?(?:::(test_\w+))?`", TEXT)
    tests = [(file := name or file, test) for name, test in named if name or test]
    assert len(tests) > 12
    for name, test in tests:
        assert not test or f"def {test}(" in (ROOT / "tests" / name).read_text(), test
    modules = [name for name in re.findall(r"`([\w/]+\.py)`", TEXT) if "test_" not in name]
    assert len(modules) > 8
    for module in modules:
        assert (ROOT / "runtime" / "nimblert" / module).exists(), module
    for module in re.findall(r"python -m (fuzz\.\w+)", TEXT):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_the_limits_are_those_of_the_runtime() -> None:
    units = {"GiB": 1 << 30, "MiB": 1 << 20}
    shown = {}
    for names, number, unit in re.findall(r"^\| (`.*?`) \| ([\d,]+) ?(GiB|MiB)? \|", TEXT, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            shown[name] = int(number.replace(",", "")) * units.get(unit, 1)
    assert shown == asdict(DEFAULT_LIMITS)
