"""`nimblec inspect --sbom`: what the schema of CycloneDX 1.5 requires, and what the plan holds."""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from command_line import CommandLine
from subprocesses import ROOT

from nimblec.inspect.sbom import Json
from nimblert.check.verify import read_plan

DATA = ROOT / "tests" / "data"


def components(found: list[Json]) -> Iterator[Json]:
    """Yield components, and those that they hold."""
    for component in found:
        yield component
        yield from components(component.get("components", []))


@pytest.mark.parametrize("path", [DATA / "plan-2.2.plan", DATA / "triton_block.plan"], ids=lambda path: path.stem)
def test_bill_has_what_the_schema_requires(nimblec: CommandLine, path: Path) -> None:
    """The constants, patterns and enumerations are those of bom-1.5.schema.json."""
    bill = json.loads(nimblec.prints("inspect", path, "--sbom"))
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", bill["serialNumber"])
    described = bill["metadata"]["component"]
    found = [described, *bill["metadata"]["tools"]["components"], *components(bill["components"])]
    for component in found:
        assert component["type"] in {"application", "library", "file", "data", "machine-learning-model"}
        assert isinstance(component["name"], str)
        for entry in component.get("hashes", []):
            assert entry["alg"] == "SHA-256"
            assert re.fullmatch("[0-9a-f]{64}", entry["content"])
        for entry in component.get("licenses", []):
            assert entry["license"].keys() in ({"id"}, {"name"})
        for entry in component.get("properties", []):
            assert isinstance(entry["name"], str)
            assert isinstance(entry["value"], str)
    references = [component["bom-ref"] for component in found if "bom-ref" in component]
    assert len(set(references)) == len(references)
    (dependency,) = bill["dependencies"]
    assert {dependency["ref"], *dependency["dependsOn"]} <= set(references)


def test_bill_names_modules_weights_and_libraries(nimblec: CommandLine) -> None:
    path = DATA / "triton_block.plan"
    plan = read_plan(path)
    bill = json.loads(nimblec.prints("inspect", path, "--sbom"))
    by_reference = {component["bom-ref"]: component for component in components(bill["components"])}
    digest = {
        name: component["hashes"][0]["content"] for name, component in by_reference.items() if "hashes" in component
    }
    assert digest["modules[0]"] == sha256(plan.modules[0].code).hexdigest()
    assert digest["weights"] == sha256(b"".join(weight.data for weight in plan.weights)).hexdigest()
    assert digest["weights[1]"] == sha256(plan.weights[1].data).hexdigest()
    assert {"name": "nimblec:origin", "value": "triton"} in by_reference["modules[0]"]["properties"]
    torch = by_reference["library torch"]
    assert (torch["version"], torch["purl"]) == ("2.11.0+cu130", "pkg:pypi/torch@2.11.0%2Bcu130")
    assert torch["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert bill["metadata"]["component"]["hashes"][0]["content"] == sha256(path.read_bytes()).hexdigest()
    assert json.loads(nimblec.prints("inspect", path, "--sbom")) == bill


@pytest.mark.parametrize("other", ["--json", "--timeline"])
def test_inspect_prints_one_form(nimblec: CommandLine, other: str) -> None:
    assert "cannot be used together" in nimblec.refused("inspect", DATA / "plan-2.2.plan", "--sbom", other)
