"""The servers of docs/serving.md, started by the commands of that document."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from subprocesses import ROOT, SOURCES

DOCUMENT = ROOT / "docs" / "serving.md"
SLOWEST_START_S = 120


def commands(language: str = "sh") -> list[str]:
    """Return the blocks of the document in this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)


def command(words: str, language: str = "sh") -> str:
    """Return the one block of the document in this language that holds ``words``."""
    (found,) = (block for block in commands(language) if words in block)
    return found.strip()


def environment(name: str) -> Path:
    """Return the folder .NAME, an environment that the document creates; skip the test if it does not exist."""
    folder = ROOT / f".{name}"
    if not folder.is_dir():
        pytest.skip(f"docs/serving.md has the command that creates .{name}, which does not exist")
    return folder


class Shop:
    """A folder in which the document's commands run as in the repository's root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("samples", "runtime", ".ray", ".mlserver"):
            (folder / name).symlink_to(ROOT / name)
        tools = folder / ".venv" / "bin"
        tools.mkdir(parents=True)
        (tools / "nimblec").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m nimblec "$@"\n')
        (tools / "nimblec").chmod(0o755)
        self.variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
            "RAY_metrics_report_interval_ms": "500",  # instead of ten seconds
        }

    def run(self, command: str, *, timeout: float = 120) -> str:
        """Run a command, which must succeed, and return its output."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder, env=self.variables, capture_output=True, text=True, check=False, timeout=timeout,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def serving(self, command: str, log: Path, is_ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
        """Run a server for the block, once it is ready; its output goes to ``log``."""
        with log.open("wb") as out:
            server = subprocess.Popen(
                shlex.split(command), cwd=self.folder, env=self.variables, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            deadline = time.monotonic() + SLOWEST_START_S
            while not is_ready():
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield server
        finally:
            server.terminate()
            try:
                server.wait(60)
            finally:
                server.kill()


def stocked(folder: Path, name: str) -> Shop:
    """Stock a shop with the document's plan for the environment .NAME; skip the test if that does not exist."""
    environment(name)
    shop = Shop(folder)
    shop.run(command("nimblec compile"))
    return shop


def infer(url: str, rows: int, **changes: object) -> tuple[int, str]:
    """Call the digits model with changes to the tensor that is sent; return the answer's status and body."""
    return answered(f"{url}/infer", request(rows, **changes), Content_Type="application/json")


def request(rows: int, **changes: object) -> bytes:
    """Return the body of a call of the digits model, with changes to the tensor that is sent."""
    tensor = {"name": "image", "shape": [rows, 1, 8, 8], "datatype": "FP32", "data": [0.5] * (64 * rows), **changes}
    return json.dumps({"inputs": [tensor]}).encode()


def answered(url: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    """Send an HTTP request; return the answer's status and body, or status 0 without an answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(url, body, named), timeout=60) as response:  # noqa: S310 — loopback
            return response.status, response.read().decode()
    except URLError as exc:
        status = getattr(exc, "code", 0)
        return status, exc.read().decode() if status else ""  # type: ignore[attr-defined]
    except ConnectionError:
        return 0, ""
