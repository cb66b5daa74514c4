"""Ctrl-C ends the command line, whatever native code is at."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cpu_plans import floats, write_model
from onnx import TensorProto, helper

from nimblec.base.installation import environment
from nimblec.cli.interrupts import prompt_interrupts


def endless(path: Path) -> Path:
    """Return a model whose loop has no end."""
    node, info = helper.make_node, helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Identity", ["go"], ["goes_on"]), node("Add", ["v", "v"], ["w"])],
        "body",
        [info("i", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, [2])],
        [info("goes_on", TensorProto.BOOL, []), info("w", TensorProto.FLOAT, [2])],
    )
    loop = node("Loop", ["", "yes", "x"], ["y"], body=body)
    return write_model(path, [loop], [floats("x", 2)], [floats("y", 2)], constants={"yes": np.array(True)})


def test_an_endless_loop_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nimblec", "compile", str(endless(tmp_path / "m.onnx")), "-v", "--no-plan-cache"]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "m.plan"), "--target", "cpu"],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    with process.stderr as stages:
        assert [stages.readline().partition(":")[0] for _ in range(2)] == ["import", "read"]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)  # it is in the loop by then
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        assert stages.read().startswith("optimise: ")
    assert not (tmp_path / "m.plan").exists()


def test_python_code_is_interrupted_as_ever() -> None:
    """It unwinds, however long that takes, and everything is as it was before."""
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), prompt_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.set_wakeup_fd(-1) == -1
