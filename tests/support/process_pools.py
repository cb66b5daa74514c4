"""Pools of processes of the CPU target for tests, and programs that use one."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from programs import bare
from subprocesses import ROOT, SOURCES

from nimblec.plan import encoder
from nimblec.refit.programs import refits_in_place
from nimblert import load_pool
from nimblert.plan import ITEM_NBYTES, Memcpy, Op, Plan, Pointer, Program, Region, Tensor, Weight
from nimblert.processes import ProcessPool
from nimblert.processes.process import Process


def pool_of(plan: Any, devices: int = 2, contexts: int = 2, **options: Any) -> ProcessPool:
    """A pool with so many processes on device 0."""
    plan = encoder.encode_file(plan) if isinstance(plan, Plan) else plan
    return load_pool(plan, devices=[0] * devices, processes=True, contexts=contexts, **options)


def copying(name: str, dtype: str, shape: tuple[int, ...], source: Region = Region.INPUT) -> Program:
    """Copies x, or weights, to y."""
    nbytes = int(np.prod(shape, dtype=int)) * ITEM_NBYTES[dtype]

    def tensor(name: str, region: Region) -> Tensor:
        strides = tuple(int(np.prod(shape[axis + 1 :], dtype=int)) for axis in range(len(shape)))
        return Tensor(name=name, dtype=dtype, shape=shape, strides=strides, pointer=Pointer(region=region))

    copy = Memcpy(dst=Pointer(region=Region.OUTPUT), src=Pointer(region=source), nbytes=nbytes, stream=0, op=0)
    return Program(
        name=name,
        inputs=(tensor("x", Region.INPUT),),
        outputs=(tensor("y", Region.OUTPUT),),
        input_nbytes=(nbytes,),
        output_nbytes=(nbytes,),
        arena_nbytes=0,
        stream_count=1,
        event_count=0,
        ops=(Op(name="copy", source=""),),
        commands=(copy,) if nbytes else (),
    )


def weighted() -> Plan:
    """Its output is the weight "w", zeros, whatever x is."""
    program = copying("main", "float32", (64,), Region.WEIGHTS)
    weight = Weight(name="w", dtype="float32", shape=(64,), offset=0, data=memoryview(bytes(256)))
    refits = refits_in_place([replace(program.inputs[0], name="w", pointer=Pointer(region=Region.WEIGHTS))])
    return bare(program, weights=(weight,), weights_nbytes=256, refits=refits)


def pids(pool: ProcessPool) -> list[int]:
    return [process._popen.pid for process in pool._all]


def calls_of(pool: ProcessPool) -> tuple[int, int]:
    """The numbers of calls in flight and of those that wait."""
    return len(pool._dispatcher._calls), len(pool._dispatcher.waiting)


def gone(pid: int) -> bool:
    """Whether no process has this number, other than one that waits for its parent to look."""
    return _states(pid) <= {"Z"}


def _states(pid: int) -> set[str]:
    """The states of the threads of a process, as ``ps`` shows them."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return set()
    return {text.rpartition(")")[2].split()[0] for text in stats}


def hung_up(process: Process) -> bool:
    """Whether all threads of a process have ended, and with them its sockets."""
    ends = select.poll()
    ends.register(process.control.socket, 0)
    return bool(ends.poll(0))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def file_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def stopped(pool: ProcessPool) -> Iterator[None]:
    """The processes do nothing until the block ends."""
    for pid in pids(pool):
        os.kill(pid, signal.SIGSTOP)
        until(lambda pid=pid: _states(pid) == {"T"})  # type: ignore[misc]
    try:
        yield
    finally:
        for pid in pids(pool):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


CHILD = """
import os, pathlib, signal, sys, threading, time, numpy as np, nimblert
options = dict(processes=True, warm=True)
def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    while any(") T " not in stat.read_text() for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")):
        time.sleep(0.001)
pool = nimblert.load_pool(sys.argv[1], devices=[0, 0], contexts=2, **options)
x = np.ones(4, np.float32)
expected = pool(x)
print(*(process._popen.pid for process in pool._all), flush=True)
"""


def child(plan: Path, code: str, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", CHILD + code, str(plan)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
