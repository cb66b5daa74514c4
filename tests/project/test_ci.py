"""The recipes of docs/ci.md, run as they stand in a clean folder, on the CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import CommandLine
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from subprocesses import ROOT, SOURCES

PAGE = (ROOT / "docs" / "ci.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def github_scripts() -> list[str]:
    workflow = yaml.safe_load(blocks("yaml")[0])
    return [step["run"] for step in workflow["jobs"]["plans"]["steps"] if "run" in step]


def is_for_absent_gpu(block: str) -> bool:
    return "h200.plan" in block


def gitlab_scripts() -> list[str]:
    return ["\n".join(yaml.safe_load(blocks("yaml")[1])["plans"]["script"])]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of the recipes, and ``nimblec`` on the path."""
    folder = tmp_path_factory.mktemp("ci")
    (folder / "nimblec").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nimblec "$@"\n')
    (folder / "nimblec").chmod(0o755)
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode().strip()
    (folder / "release").write_text(f"{secret}\n")
    (folder / "release.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    (folder / "releases").mkdir()
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "RELEASES": str(folder / "releases"),
        "KEYS": str(folder),
        "VERSION": "v1",
        "CI_COMMIT_SHA": "v2",
    }


def check_out(folder: Path, environment: dict[str, str], build_file: str = blocks("toml")[0]) -> None:
    """Write what the page's commands need: models, an input, the public key, and a build file."""
    for name in ("models", "plans"):
        (folder / name).mkdir(parents=True)
    for model in ("digits.onnx", "digits_batch.onnx"):
        shutil.copy(ROOT / "samples" / model, folder / "models")
    shutil.copy(ROOT / "samples" / "digit_7.npy", folder)
    shutil.copy(Path(environment["KEYS"]) / "release.pub", folder)
    (folder / "plans" / "plans.toml").write_text(build_file)


def without_figures(text: str) -> str:
    """Return words in a row, without numbers and digests, which differ between machines."""
    return " ".join(re.sub(r"\b[0-9a-f]{12}\b|[-+]?\d[\d.,]*( (ns|us|ms|s|B|kB)\b)?|─+", "#", text).split())


def check_transcripts(wanted: Callable[[str], bool], folder: Path, environment: dict[str, str]) -> None:
    """Run the commands of the page's transcripts in one folder, and compare what they print; ``…`` is any text."""
    for block in filter(wanted, blocks("console")):
        for step in block.removeprefix("$ ").split("\n$ "):
            command, _, shown = step.partition("\n")
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env={**environment, "COLUMNS": "200", "HOME": str(folder)},  # so that no plan comes from a cache
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            expected = ".*".join(map(re.escape, without_figures(shown).split("…")))
            assert re.fullmatch(expected, without_figures(done.stdout)), f"{command}\n{done.stdout}"
            assert done.returncode == 0, command


def run(scripts: list[str], folder: Path, environment: dict[str, str], build_file: str = blocks("toml")[0]) -> Any:
    """Run the scripts in a checkout with a build file, by default that of the page, and the models that it names."""
    check_out(folder, environment, build_file)
    for script in scripts:
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script],
            cwd=folder,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return yaml.safe_load((folder / "build.json").read_text())["plans"]


@pytest.mark.skipif(
    find_spec("triton") is None or find_spec("nvidia") is None, reason="needs PyTorch's CUDA build and Triton"
)
def test_transcripts_for_absent_gpus(tmp_path: Path, environment: dict[str, str]) -> None:
    check_out(tmp_path, environment)
    inherited = os.pathsep.join([environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    environment = {**environment, "PYTHONPATH": inherited, "CUDA_VISIBLE_DEVICES": ""}
    check_transcripts(is_for_absent_gpu, tmp_path, environment)


def test_transcripts_for_the_cpu(tmp_path: Path, environment: dict[str, str]) -> None:
    check_out(tmp_path, environment)
    shutil.copy(Path(environment["KEYS"]) / "release", tmp_path)
    check_transcripts(lambda block: not is_for_absent_gpu(block), tmp_path, environment)
    assert "<html" in (tmp_path / "one.html").read_text()
    assert "<html" in (tmp_path / "diff.html").read_text()


def test_recipes_publish_plans(tmp_path: Path, environment: dict[str, str]) -> None:
    """The second recipe fetches what the first has published, and builds only what differs."""
    secret = (Path(environment["KEYS"]) / "release").read_text().strip()
    built = run(github_scripts(), tmp_path / "github", {**environment, "SIGNING_KEY": secret})
    assert not (tmp_path / "github" / "signing.key").exists()
    environment = {**environment, "SIGNING_KEY": f"{environment['KEYS']}/release"}
    assert [plan["state"] for plan in built] == ["built", "built"]
    fetched = run(gitlab_scripts(), tmp_path / "gitlab", environment)
    assert [plan["state"] for plan in fetched] == ["up to date", "up to date"]
    latest = Path(environment["RELEASES"]) / "latest"
    resized = blocks("toml")[0].replace("[1, 2, 4]", "[1, 2]")
    with pytest.raises(AssertionError, match=r"failed: interface: \d+ changed"):
        run(gitlab_scripts(), tmp_path / "resized", {**environment, "CI_COMMIT_SHA": "v3"}, resized)
    assert latest.readlink() == Path("v2")
    published = {f"{name}{suffix}" for name in ("digits", "one") for suffix in (".plan", ".plan.sig", ".html")}
    published.add("plans.lock")
    assert {path.name for path in latest.iterdir()} == published


def test_dockerfile_makes_a_lean_server(nimblec: CommandLine, tmp_path: Path) -> None:
    """Copies and entry point, below a folder in the place of the image's root; packages are those of this checkout."""
    nimblec.prints("compile", ROOT / "samples" / "digits.onnx", "--target", "cpu", "-o", tmp_path / "digits.plan")
    text = (ROOT / "samples" / "serving" / "Dockerfile").read_text()
    for source, place in re.findall(r"^COPY ([^-\s]\S*) (/app/\S+)", text, re.MULTILINE):
        copied = tmp_path / "image" / place[1:]
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "digits.plan" if source == "$PLAN" else ROOT / source, copied)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", text, re.MULTILINE)
    command = [part.replace("/app/", f"{tmp_path}/image/app/") for part in json.loads(entry)]
    command[0] = sys.executable
    done = subprocess.run(
        [*command, ROOT / "samples" / "digit_7.npy"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("digit: [7]\n"), done.stderr
    assert "RUN pip install --no-cache-dir --target /packages '/runtime[cpu]'" in text


def test_schemas_are_named() -> None:
    names = {path.name for path in (ROOT / "docs" / "schemas").iterdir()}
    assert set(re.findall(r"\(schemas/(.*?)\)", PAGE)) == names


def test_completion_is_that_of_click(environment: dict[str, str]) -> None:
    (script,) = blocks("sh")
    done = subprocess.run(
        ["bash", "-ec", f"{script}\ncomplete -p nimblec"], env=environment, check=False, capture_output=True, text=True
    )
    assert "-F _nimblec_completion nimblec" in done.stdout, done.stderr
