"""Names in a file do not reach the terminal as anything but text, and a reader that leaves is no failure."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import CommandLine
from cpu_plans import floats, write_model
from onnx import helper
from plans import cpu_plan, cuda_plan

from nimblec.base.installation import environment
from nimblec.cli.console import printable
from nimblec.plan import encoder
from nimblert.plan import Plan, Program

ROOT = Path(__file__).parents[2]
EVIL = "\x1b]0;evil\x07\u202eevil\u2066\x9b31m\x00\nok       golden: forged"


def hostile(plan: Plan) -> Plan:
    """Return the plan with every name that it may choose turned into an attack on the terminal."""
    program = plan.programs[0]
    changed: Program = replace(
        program,
        name=program.name + EVIL,
        ops=tuple(replace(op, name=op.name + EVIL) for op in program.ops),
        inputs=tuple(replace(tensor, name=tensor.name + EVIL) for tensor in program.inputs),
        outputs=tuple(replace(tensor, name=tensor.name + EVIL) for tensor in program.outputs),
        golden=None,
    )
    return replace(
        plan,
        producer=plan.producer + EVIL,
        versions=((f"torch{EVIL}", f"1{EVIL}"),),
        device=replace(plan.device, name=plan.device.name + EVIL),
        modules=tuple(replace(module, origin=f"{module.origin}{EVIL}") for module in plan.modules),
        weights=tuple(replace(weight, name=weight.name + EVIL) for weight in plan.weights),
        programs=(changed,),
    )


def assert_harmless(*texts: str) -> None:
    for text in texts:
        assert [line for line in text.splitlines() if not line.isprintable()] == []
        assert "golden: forged" not in [line.strip()[-14:] for line in text.splitlines() if line.startswith("ok")]


INSPECT = [["inspect"], ["inspect", "--json"], ["inspect", "--timeline"]]
RUN = [["run"], ["run", "--debug"]]


@pytest.mark.parametrize(
    ("plan", "command"),
    [
        *((cpu_plan, command) for command in INSPECT + RUN),
        *((cuda_plan, command) for command in [*INSPECT, ["verify"]]),
    ],
)
def test_names_of_a_plan(nimblec: CommandLine, tmp_path: Path, plan: Callable[[], Plan], command: list[str]) -> None:
    path = tmp_path / "evil.plan"
    encoder.write(hostile(plan()), path)
    done = nimblec(*command, path)
    assert "evil" in done.out + done.err
    assert_harmless(done.out, done.err)
    if "--json" in command:
        assert json.loads(done.out)["producer"].endswith(EVIL)


def test_names_of_a_plan_on_a_terminal(nimblec: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rich writes colours of its own."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = tmp_path / "evil.plan"
    encoder.write(hostile(cuda_plan()), path)
    done = nimblec("inspect", path)
    assert "\x1b[" in done.out
    assert not {"\x1b]", "\x07", "\u202e", "\u2066", "\x9b", "\x00"} & {
        done.out[i : i + n] for n in (1, 2) for i in range(len(done.out))
    }


def test_names_of_a_model_and_of_a_file(nimblec: CommandLine, tmp_path: Path) -> None:
    nodes = [helper.make_node("Frob", ["x"], ["y"], name=f"node{EVIL}")]
    path = tmp_path / "evil\x1b]0;\x07.onnx"
    write_model(path, nodes, [floats("x", 2)], [floats("y", 2)])
    for options in ([], ["--debug"], ["-v"]):
        done = nimblec("compile", path, "-o", tmp_path / "m.plan", "--target", "cpu", *options)
        assert done.status == 2
        assert "unknown operator Frob" in done.err
        assert_harmless(done.out, done.err)
    assert_harmless(nimblec.refused("compile", f"{path}\x1b", "-o", tmp_path / "m.plan"))
    assert_harmless(nimblec.refused("inspect", path))


def test_what_prints_is_left_as_it_is() -> None:
    assert printable("größer 模型 🙂 'a b'") == "größer 模型 🙂 'a b'"
    assert printable("a\tb\n\x1b\u202e\udc80") == r"a\tb\n\u001b\u202e\udc80"


@pytest.mark.parametrize("command", ["inspect samples/digits.plan --json", "compile --help"])
def test_a_reader_that_leaves_is_no_failure(tmp_path: Path, command: str) -> None:
    """The status is that of a program that SIGPIPE ended, as of any other in front of `head`."""
    plan = tmp_path / "m.plan"
    encoder.write(cuda_plan(), plan)
    arguments = command.replace("samples/digits.plan", str(plan)).split()
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "nimblec", *arguments],
            stdout=closed, stderr=subprocess.PIPE, check=False, env=environment(), timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["--version", "compile --help"])
def test_a_full_disk_behind_what_is_printed_is_one_sentence(command: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nimblec", *command.split()],
            stdout=full, stderr=subprocess.PIPE, check=False, env=environment(), timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, b"nimblec: No space left on device\n")


@pytest.mark.parametrize(("closed", "name", "status"), [(">&-", "m.plan", 0), ("2>&-", "none.plan", 2)])
def test_what_a_closed_stream_would_show_is_dropped(tmp_path: Path, closed: str, name: str, status: int) -> None:
    encoder.write(cuda_plan(), tmp_path / "m.plan")
    command = [sys.executable, "-m", "nimblec", "inspect", "--json", str(tmp_path / name)]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
        capture_output=True, text=True, check=False, env=environment(), timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_a_locale_without_the_names_characters(tmp_path: Path) -> None:
    """Files and names beyond ASCII where Python's own mode for that is off."""
    model = tmp_path / "modèle.onnx"
    write_model(model, [helper.make_node("Relu", ["entrée"], ["y"])], [floats("entrée", 2)], [floats("y", 2)])
    plan = tmp_path / "modèle.plan"
    ascii_only = {**environment(), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ascii_only.pop("PYTHONIOENCODING", None)
    for arguments in (
        ["compile", model, "-o", plan, "--target", "cpu"],
        ["run", plan],
        ["inspect", plan],
        ["verify", plan, "--against", model],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "nimblec", *arguments],
            capture_output=True, text=True, check=False, env=ascii_only, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), (arguments, done)
        assert done.stdout.isascii()
