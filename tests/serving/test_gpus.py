"""The recipe of docs/serving.md for several GPUs. A plan for the CPU stands in for one that needs a GPU."""

import shlex
import sys

import pytest
from serving import Shop, command


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    shop = Shop(tmp_path_factory.mktemp("gpus"))
    shop.run(command("nimblec compile"))
    (shop.folder / "gpus.py").write_text(command("ProcessPoolExecutor", "python"))
    (shop.folder / "lost.py").write_text(LOST)
    return shop


LOST = """
import os, signal
from concurrent.futures.process import BrokenProcessPool
import numpy as np
import gpus

def seen():
    return os.environ["CUDA_VISIBLE_DEVICES"]

if __name__ == "__main__":
    given = {"image": np.load("samples/digit_7.npy")}
    processes = [gpus.started(gpu) for gpu in (0, 1)]
    print(*[process.submit(seen).result() for process in processes])
    lost = processes[0].submit(os.getpid).result()
    os.kill(lost, signal.SIGKILL)
    try:
        processes[0].submit(gpus.run, given).result()
    except BrokenProcessPool:
        print("lost")
    processes[0] = gpus.started(0)
    print(*[process.submit(gpus.run, given).result()["digit"].item() for process in processes])
"""


def test_recipe_spreads_calls_over_processes(shop: Shop) -> None:
    assert shop.run(f"{shlex.quote(sys.executable)} gpus.py") == f"{[7] * 8}\n"


def test_recipe_replaces_a_lost_process(shop: Shop) -> None:
    """Each process sees a GPU of its own, and the loss of one leaves the other at work."""
    assert shop.run(f"{shlex.quote(sys.executable)} lost.py") == "0 1\nlost\n7 7\n"
