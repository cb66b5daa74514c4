"""What ``--json`` prints has the form of the schemas in docs/schemas, for plans of both targets."""

import json
from pathlib import Path

import jsonschema
import pytest
from command_line import CommandLine
from plans import cuda_plan, several_entries
from subprocesses import ROOT

from nimblec.cli import cli
from nimblec.plan import encoder
from nimblert.plan import Plan

SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs" / "schemas").glob("*.json")}


def check(command: str, text: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[command]).validate(json.loads(text))


def test_each_json_has_a_schema() -> None:
    printing = {name for name, command in cli.commands.items() if any("--json" in p.opts for p in command.params)}
    assert printing == SCHEMAS.keys()
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_json_of_plan_made_here(nimblec: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "plans.toml"
    model = ROOT / "samples" / "digits_batch.onnx"
    file.write_text(f'[plans.d]\nmodel = "{model}"\ntarget = "cpu"\ndim = {{ batch = [1, 2] }}\nmax-latency = 60')
    done = nimblec("build", file, "--check", "--json")
    check("build", done.out)
    check("build", nimblec.prints("build", file, "--json"))
    plan = tmp_path / "d.plan"
    check("compile", nimblec.prints("compile", model, "--dim", "batch=2", "-o", tmp_path / "c.plan", "--json"))
    check("diff", nimblec("diff", plan, tmp_path / "c.plan", "--json", "--fail-on", "interface").out)
    check("inspect", nimblec.prints("inspect", plan, "--json"))
    check("verify", nimblec.prints("verify", plan, "--json"))
    check("doctor", nimblec.prints("doctor", "--json"))
    check("bench", nimblec.prints("bench", plan, "--json", "--duration", "0.1", "--warm-up", "0", "--profile"))


@pytest.mark.parametrize("plan", [cuda_plan(), several_entries()], ids=["cuda", "entries"])
def test_json_of_other_plan(nimblec: CommandLine, tmp_path: Path, plan: Plan) -> None:
    encoder.write(plan, tmp_path / "p.plan")
    check("inspect", nimblec.prints("inspect", tmp_path / "p.plan", "--json"))
    check("verify", nimblec("verify", tmp_path / "p.plan", "--json").out)
