"""What happens to a pool of processes in programs that interrupt it, fork, run out of files, or end."""

import errno
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_plans import bent_sum
from process_pools import calls_of, child, file_count, gone, hung_up, pids, pool_of, stopped, until, weighted
from sized_plans import sized
from subprocesses import SOURCES

from nimblert import CudaError, DeviceLostError, InputError, PlanError, load_pool
from nimblert.files import container
from nimblert.processes import layout, process
from nimblert.processes.channel import Channel, error_message

X = np.ones(4, np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return bent_sum(tmp_path)


def answered(done: "subprocess.Popen[str]") -> list[str]:
    """The lines that a program prints after those of `child`; nothing may be on its standard error."""
    out, err = done.communicate(timeout=120)
    assert (done.returncode, err) == (0, "")
    return out.splitlines()[1:]


CLOSING = """
import atexit
class Server:
    def __init__(self):
        self.pool = pool
    def __del__(self):
        self.pool.close()
server = Server()
del pool
try:
    server.pool.hold(1)
    server.pool(x)
except nimblert.InputError as exc:
    print(exc)
"""


def test_a_pool_may_be_closed_while_the_interpreter_ends(path: Path) -> None:
    with child(path, CLOSING) as done:
        assert answered(done) == ["this pool can no longer be used: the interpreter is shutting down"]


ALARMS = """
import gc, random
def alarm(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, alarm)
pool.close()
pool = nimblert.load_pool(sys.argv[1], devices=[0], contexts=2, **options)
gc.collect()  # of the pool before: Python prints what is raised while weak references to it end
interrupted, last, wanted = 0, None, expected.tolist()
end = time.monotonic() + 4
while time.monotonic() < end or interrupted <= 20:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.random() * 4e-4 + 2e-5)
        try:
            for _ in range(5):
                assert pool(x).tolist() == wanted  # numpy's array_equal drops exceptions
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeoutError as exc:
        interrupted, last = interrupted + 1, exc
assert interrupted > 20, interrupted
others = [threading.Thread(target=lambda: [pool(x) for _ in range(50)]) for _ in range(4)]
for other in others:
    other.start()
assert np.array_equal(pool(x), expected)
for other in others:
    other.join()
pool.close()
print("closed")
"""


def test_no_exception_of_a_signal_handler_loses_a_slot(path: Path) -> None:
    with child(path, ALARMS) as done:
        assert answered(done) == ["closed"]


WITHIN = """
def interrupting(frame, event, _):
    if frame.f_code.co_name == "submit" and event == "return":
        sys.settrace(None)
        raise KeyboardInterrupt
    return interrupting
try:
    with pool:
        sys.settrace(interrupting)
        pool(x)
except KeyboardInterrupt:
    print("closed")
pool = nimblert.load_pool(sys.argv[1], devices=[0], contexts=1, **options)
def handler(*_):
    pool.refit({name: np.zeros(t.shape, np.float32) for name, t in pool.weights.items()})
    pool.close()
signal.signal(signal.SIGALRM, handler)
worker = pool._all[0]._popen.pid
stop(worker)
threading.Timer(0.5, os.kill, (worker, signal.SIGCONT)).start()
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    print(pool(x).shape)
except nimblert.DeviceLostError as exc:
    print(exc)
"""


def test_who_closes_a_pool_does_not_wait_for_itself(path: Path) -> None:
    """Neither while the exception that interrupted its call is there, nor in a signal handler."""
    with child(path, WITHIN) as done:
        first, second = answered(done)
    assert first == "closed"
    assert second == "(4,)" or second.startswith("device 0: its process ended with status 0 during this call")


OPENING = """
pool.close()
pool = nimblert.load_pool(sys.argv[1], devices=[0], contexts=1, processes=True)
file = open(sys.argv[2], "r+b")
opened = []
real = pool._all[0].slots[0]._memory.arrays
def closing(places):
    pool.close()
    opened.extend(os.dup(file.fileno()) for _ in range(40))
    return real(places)
pool._all[0].slots[0]._memory.arrays = closing
print(pool(x).shape)
for number in opened:
    os.close(number)
file.close()
"""


def test_a_pool_that_is_closed_within_a_call_writes_into_nobodys_file(path: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    with child(path, OPENING.replace("sys.argv[2]", repr(str(mine)))) as done:
        assert answered(done) == ["(4,)"]
    assert mine.read_bytes() == b"mine"


CLOSINGS = """
import faulthandler
faulthandler.dump_traceback_later(90, exit=True)
pool.close()
def close_too(*_):
    pool.close()
for delay in [*range(5, 100, 5), *range(100, 1000, 100)]:
    pool = nimblert.load_pool(sys.argv[1], devices=[0], contexts=1, **options)
    signal.signal(signal.SIGALRM, close_too)
    signal.setitimer(signal.ITIMER_REAL, delay * 1e-6)
    pool.close()
    while signal.getitimer(signal.ITIMER_REAL)[0]:
        time.sleep(1e-4)
pool = nimblert.load_pool(sys.argv[1], devices=[0], contexts=1, **options)
worker = pool._all[0]._popen.pid
stop(worker)
shapes = []
caller = threading.Thread(target=lambda: shapes.append(pool(x).shape))
caller.start()
while not pool._all[0].in_flight:
    time.sleep(0.001)
def interrupt(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, interrupt)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    pool.close()
except TimeoutError:
    os.kill(worker, signal.SIGCONT)
pool.close()
caller.join()
print(*shapes, os.path.exists(f"/proc/{worker}"))
"""


def test_a_close_may_be_interrupted_by_another_and_finished_later(path: Path) -> None:
    with child(path, CLOSINGS) as done:
        assert answered(done) == ["(4,) False"]


FINALIZERS = """
import faulthandler, gc
faulthandler.dump_traceback_later(30, exit=True)
gc.disable()
class Server:
    def __init__(self):
        self.pool, self.me = pool, self
    def __del__(self):
        try:
            self.pool(x)
        except nimblert.InputError as exc:
            print(exc)
        self.pool.close()
Server()
real = pool._dispatcher._begin_waiting
def collecting():
    gc.collect()
    return real()
pool._dispatcher._begin_waiting = collecting
try:
    print(pool(x).shape)
except nimblert.InputError as exc:
    print(exc)
pool.close()
print(gone := not os.path.exists(f"/proc/{pool._all[0]._popen.pid}"))
"""


def test_a_call_that_comes_as_the_pool_ends_is_refused(path: Path) -> None:
    pool = pool_of(path, 1, 1)
    pool.close()
    pool._dispatcher.is_closed = False  # as a caller saw it before
    for use in (lambda: pool(X), lambda: pool.refit({})):
        with pytest.raises(InputError, match="this pool is closed: load the plan again"):
            use()


def test_a_finalizer_in_the_pools_own_thread_waits_for_nothing(path: Path) -> None:
    with child(path, FINALIZERS) as done:
        first, *_, last = answered(done)
    assert first.startswith("this pool cannot be used in its own thread, where the garbage collector has called")
    assert last == "True"


COLLECTIONS = """
threads = []
class Request:
    def __init__(self):
        self.me = self
    def __del__(self):
        threads.append(threading.current_thread().name)
for _ in range(4000):
    Request()
    pool(x)
pool.close()
print(len(threads) > 1000, threads.count("MainThread") / len(threads) > 0.99)
"""


def test_collections_take_place_in_the_callers_threads(path: Path) -> None:
    with child(path, COLLECTIONS) as done:
        assert answered(done) == ["True True"]


REFITS = """
import faulthandler, random
faulthandler.dump_traceback_later(30, exit=True)
class Late(Exception):
    pass
def alarm(*_):
    raise Late
signal.signal(signal.SIGALRM, alarm)
new = {name: np.zeros(t.shape, np.float32) for name, t in pool.weights.items()}
interrupted, end = 0, time.monotonic() + 3
while time.monotonic() < end or interrupted <= 20:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.random() * 2e-3 + 2e-5)
        try:
            pool.refit(new)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Late:
        interrupted += 1
assert interrupted > 20, interrupted
signal.signal(signal.SIGALRM, lambda *_: pool.refit(new))
for _ in range(100):
    signal.setitimer(signal.ITIMER_REAL, random.random() * 1e-3 + 2e-5)
    pool.refit(new)
signal.setitimer(signal.ITIMER_REAL, 0)
pool(x)
pool.close()
print("closed")
"""


def test_a_refit_may_be_interrupted_and_made_by_a_handler(path: Path) -> None:
    with child(path, REFITS) as done:
        assert answered(done) == ["closed"]


def test_an_error_that_ended_a_process_is_not_the_refits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = np.zeros(64, np.float32), np.arange(64, dtype=np.float32)
    with pool_of(weighted()) as pool:
        failed = error_message(CudaError("cuEventSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS"))
        monkeypatch.setattr(pool._all[0].control, "receive", lambda: failed)
        pool.refit({"w": w})
        assert pool.devices == (0,)
        assert pool._all[0].ended == "cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS ended its process"
        assert gone(pids(pool)[0])
        assert all(np.array_equal(pool(x), w) for _ in range(4))


def test_a_timeout_of_all_sockets_is_not_the_pools(path: Path) -> None:
    code = "import socket; socket.setdefaulttimeout(0.2); pool.close(); time.sleep(0.5)\n"
    code += "pool = nimblert.load_pool(sys.argv[1], devices=[0], contexts=2, **options)\n"
    code += "time.sleep(0.5); print(*pool(x) == expected)"
    with child(path, code) as done:
        assert answered(done) == ["True True True True"]


def test_a_device_that_could_not_change_its_weights_is_out_of_service(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = np.zeros(64, np.float32), np.arange(64, dtype=np.float32)
    with pool_of(weighted()) as pool:
        answers = pool._all[1].control.receive
        count = 0

        def receive() -> bytes:
            nonlocal count
            count += 1
            message = answers()
            return error_message(CudaError("cuGraphLaunch", "CUDA_ERROR_OUT_OF_MEMORY")) if count == 2 else message

        monkeypatch.setattr(pool._all[1].control, "receive", receive)
        pool.refit({"w": w})
        assert pool.devices == (0,)
        refused = CudaError("cuGraphLaunch", "CUDA_ERROR_OUT_OF_MEMORY")
        assert pool._all[1].ended == f"its weights could not be replaced ({refused})"
        assert all(np.array_equal(pool(x), w) for _ in range(4))


def test_calls_of_ever_more_sizes_open_few_files() -> None:
    def files(pid: int) -> int:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    with pool_of(sized(2, 4, 8), 1, 1) as pool:
        (worker,) = pids(pool)
        before = file_count(), files(worker)
        for count in range(1, 60):
            x = np.arange(300 * count, dtype=np.int32)
            pool.run({"x": x.reshape(100 * count, 3), "w": x[: 200 * count].reshape(2, 100 * count)})
        assert (file_count(), files(worker)) <= (before[0] + 2, before[1] + 2)


def test_a_fork_during_the_load_keeps_no_end_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = process._popen
    forked: list[int] = []

    def starting(*args: Any) -> Any:
        made = started(*args)
        pid = os.fork()
        if not pid:
            signal.pause()
            os._exit(0)
        forked.append(pid)
        return made

    monkeypatch.setattr(process, "_popen", starting)
    monkeypatch.setattr("warnings.warn", lambda *_, **__: None)  # of forks of programs with threads
    try:
        with pool_of(path, 1, 1) as pool, ThreadPoolExecutor(1) as threads, stopped(pool):
            call = threads.submit(pool, X)
            until(lambda: calls_of(pool) == (1, 0))
            os.kill(pids(pool)[0], signal.SIGKILL)
            assert isinstance(call.exception(20), DeviceLostError)
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_too_many_contexts_are_refused_and_leave_no_file_open(path: Path) -> None:
    before, (soft, hard) = file_count(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 100, hard))
    try:
        with pytest.raises(InputError, match=r"no file left to open .*: give fewer contexts, or raise the limit"):
            load_pool(path, processes=True, contexts=400)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert file_count() <= before


@pytest.mark.parametrize("name", ["nimblert-pool", "nimblert-pool-copy"])
def test_without_a_thread_left_a_pool_is_refused_and_leaves_no_file_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before, start = file_count(), threading.Thread.start

    def full(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(InputError, match=r"a thread cannot be started \(can't start new thread\), .*: give fewer"):
        load_pool(path, processes=True, contexts=1)
    until(lambda: file_count() <= before)


@pytest.mark.parametrize(("module", "name"), [(select, "epoll"), (os, "open")])
def test_without_a_file_left_a_pool_is_refused_and_leaves_no_file_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    before, opening = file_count(), getattr(module, name)

    def full(*args: Any, **options: Any) -> Any:
        if args in ((), (path, os.O_RDONLY)):
            raise OSError(errno.EMFILE, "Too many open files")
        return opening(*args, **options)

    monkeypatch.setattr(module, name, full)
    with pytest.raises(InputError, match=r"no file left to open \(Too many open files\)") as caught:
        load_pool(path, processes=True, contexts=1, copy=True)
    assert file_count() == before
    del caught  # until here it kept what its frames have: nothing was left to the garbage collector


def test_a_plan_that_is_removed_while_it_is_loaded_is_a_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_digest = container.verify_digest

    def removing(image: memoryview, name: str) -> None:
        verify_digest(image, name)
        path.unlink()

    monkeypatch.setattr(container, "verify_digest", removing)
    with pytest.raises(PlanError, match=r"m\.plan: cannot be read: No such file or directory$"):
        load_pool(path, processes=True, contexts=1)


@pytest.mark.parametrize("contexts", [0, -1, 1.5, "8", None, True])
def test_a_number_of_contexts_that_is_none_is_refused(path: Path, contexts: Any) -> None:
    with pytest.raises(InputError, match=r"^contexts: got .*, expected a number of at least 1"):
        load_pool(path, processes=True, contexts=contexts)


@pytest.mark.parametrize("devices", [0, [], ["0"]])
def test_devices_that_are_none_are_refused(path: Path, devices: Any) -> None:
    with pytest.raises(InputError, match=r"^devices: got .*, expected ordinals of GPUs$"):
        load_pool(path, processes=True, devices=devices)


def test_numbers_of_numpy_are_numbers(path: Path) -> None:
    with load_pool(path, processes=True, devices=[np.int64(0)], contexts=1, warm=np.bool_(True)) as pool:
        assert pool(X).shape == (4,)


IMPORTS = """
import json, os, pathlib, sys
import numpy as np, nimblert, nimblert.processes.loading, subprocess, multiprocessing.spawn
os.chdir(sys.argv[2])
sys.path.append(pathlib.Path("/"))
print(nimblert.load_pool(sys.argv[1], processes=True, contexts=1)(np.ones(4, np.float32)).shape)
"""


@pytest.mark.parametrize("flags", [(), ("-I",), ("-P",)])
def test_processes_import_what_this_one_does(path: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Not what lies in the folder that is current by then, nor by PYTHONPATH where this one ignores it."""
    evil, runtime = tmp_path / "evil", str(SOURCES[-1])
    evil.mkdir()
    for name in ("json", "sitecustomize"):
        (evil / f"{name}.py").write_text("import sys; print('evil', file=sys.stderr); sys.exit(7)")
    first = f"import sys; sys.path[:0] = [{os.path.relpath(runtime)!r}]; "
    environment = os.environ | ({"PYTHONPATH": str(evil)} if "-I" in flags else {})
    command = [sys.executable, *flags, "-c", first + IMPORTS, str(path), str(evil)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("(4,)\n", "", 0)


@pytest.mark.parametrize("python", ["", "/no/python"])
def test_a_program_without_an_interpreter_is_told(path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(python))
    before = file_count()
    with pytest.raises(InputError, match=r"^processes: .*: name one by multiprocessing.set_executable, or load"):
        load_pool(path, processes=True)
    assert file_count() <= before


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 6, "signal 40")])
def test_a_process_that_ended_between_calls_is_reaped_and_told(path: Path, number: int, name: str) -> None:
    with pool_of(path, 2) as pool:
        (first, second) = pids(pool)
        os.kill(first, number)
        until(lambda: hung_up(pool._all[0]))
        for _ in range(4):
            assert pool(X).shape == (4,)
        until(lambda: not Path(f"/proc/{first}").exists())
        os.kill(second, signal.SIGSEGV)
        until(lambda: hung_up(pool._all[1]))
        with pytest.raises(DeviceLostError, match=rf"was ended by {name}; .* by SIGSEGV\): load the plan again"):
            pool(X)


def test_an_entry_of_more_axes_than_a_message_tells_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LONGEST_NBYTES", 8)
    with pytest.raises(InputError, match=r"^entry 'main': its inputs have 1 axes, pools of processes take 0"):
        load_pool(path, processes=True)


def test_a_message_that_cannot_be_sent_is_no_lost_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Channel.send
    with pool_of(path, 1, 1) as pool:
        monkeypatch.setattr(Channel, "send", lambda channel, _: send(channel, bytes(1 << 22)))
        with pytest.raises(OSError, match="Message too long"):
            pool(X)
        monkeypatch.undo()
        assert pool(X).shape == (4,)


@pytest.mark.parametrize("broken", ["_receive", "_begin_waiting"])
def test_an_error_of_the_pool_itself_keeps_nobody_waiting(
    path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(path, 1, 1)

    def fail(*_: object) -> bool:
        if broken == "_begin_waiting" and pool._dispatcher._calls:
            return False  # nothing can begin
        raise ZeroDivisionError

    errors: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_type))
    thread = pool._dispatcher._threads[0]
    with ThreadPoolExecutor(3) as threads:
        with stopped(pool):
            calls = [threads.submit(pool, X)]
            until(lambda: calls_of(pool) == (1, 0))
            calls += [threads.submit(pool, X) for _ in range(2)]
            until(lambda: calls_of(pool) == (1, 2))
            monkeypatch.setattr(pool._dispatcher, broken, fail)
        ends = [str(call.exception(20)) for call in calls]
    assert set(ends[1:]) == {"this pool is closed: load the plan again"}
    assert ends[0] == (ends[1] if broken == "_receive" else "None")
    pool.close()
    assert gone(pids(pool)[0])
    thread.join(20)
    assert errors == [ZeroDivisionError]


def test_a_handler_may_call_a_pool_that_has_lost_its_devices(path: Path) -> None:
    code = """
pool.close()
pool = nimblert.load_pool(sys.argv[1], devices=[0], contexts=1, **options)
def lost(*_):
    try:
        pool(x)
    except nimblert.DeviceLostError:
        return True
signal.signal(signal.SIGALRM, lost)
os.kill(pool._all[0]._popen.pid, signal.SIGKILL)
for count in range(1000):
    signal.setitimer(signal.ITIMER_REAL, 1e-4 + count * 1e-6)
    for _ in range(20):
        assert lost()
signal.setitimer(signal.ITIMER_REAL, 0)
print("lost")
"""
    with child(path, code) as done:
        assert answered(done) == ["lost"]


def test_standard_streams_may_be_closed(path: Path) -> None:
    code = "pool.refit({name: np.zeros(t.shape, np.float32) for name, t in pool.weights.items()}); pool(x)"
    with child(path, code, preexec_fn=partial(os.close, 0)) as done:
        assert answered(done) == []


def test_elsewhere_than_on_linux_it_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(InputError, match="a pool of processes needs Linux"):
        load_pool(path, processes=True)


def test_a_pool_is_not_pickled(path: Path) -> None:
    with pool_of(path, 1, 1) as pool, pytest.raises(InputError, match="load the plan where it is to run"):
        pickle.dumps(pool)
