"""What runs in a process of a pool: the plan on one device, and a thread for each context."""

import json
import os
import select
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any, Never

from nimblert.calls import refitting
from nimblert.calls.changing import Change
from nimblert.calls.entries import Entries
from nimblert.context import Context
from nimblert.errors import CudaError
from nimblert.executable import Executable, load
from nimblert.limits import Limits
from nimblert.processes import weights
from nimblert.processes.channel import DONE, READY, Channel, Memory, begin, error_message
from nimblert.processes.layout import Layout, Layouts, Views


def main(text: str) -> None:
    """Serve one device, as ``text`` says in JSON, until the other end of the control socket is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a service manager's go to every process
        signal.signal(number, signal.SIG_IGN)  # the pool decides when to end
    given = json.loads(text)
    control, *sockets = (Channel(socket.socket(fileno=file)) for file in given["sockets"])
    try:
        begin(threading.Thread(target=_end_with, args=(control,), daemon=True))
        executable = _loaded(given)
        contexts = [executable, *(executable.context() for _ in sockets[1:])]
        if given["warm"]:
            for context in contexts:
                context.warm()
        for context, channel, file in zip(contexts, sockets, given["memories"], strict=True):
            begin(threading.Thread(target=_serve, args=(context, channel, Memory(file), control), daemon=True))
    except Exception as exc:  # noqa: BLE001 - the pool raises it
        control.send(error_message(exc))
        return
    control.send(READY)
    new_weights = Memory(given["weights"])
    while message := control.receive():
        _refit(executable, message, new_weights, control)
    os._exit(0)


def _end_with(control: Channel) -> None:
    """End this process when the pool's is gone or wants it to, whatever other threads do."""
    gone = select.poll()
    gone.register(control.socket, 0)
    gone.poll()
    os._exit(0)


def _loaded(given: Mapping[str, Any]) -> Executable:
    return load(
        given["plan"],
        device=given["device"],
        program=given["program"],
        poison=given["poison"],
        copy=given["copy"],
        limits=Limits(**given["limits"]),
    )


def _serve(context: Context, channel: Channel, memory: Memory, control: Channel) -> None:
    """Answer the calls of one slot."""
    layouts, views = Layouts(Entries(context.plan)), Views(memory)
    try:
        while message := channel.receive():
            try:
                _run(context, layouts.read(message), views)
                answer = DONE
            except Exception as exc:  # noqa: BLE001 - the caller gets it
                answer = _answer(exc, control)
            channel.send(answer)
    finally:
        channel.end()  # so that no caller waits for a thread that has failed


def _run(context: Context, layout: Layout, views: Views) -> None:
    inputs, outputs = views.of(layout)
    arrays = {place.name: view for place, view in zip(layout.inputs, inputs, strict=True)}
    for view, result in zip(outputs, context.run(arrays, entry=layout.entry).values(), strict=True):
        view[...] = result


def _answer(exc: Exception, control: Channel) -> bytes:
    """The message of an error; one that ends the use of CUDA ends the process, as other threads' calls would fail."""
    message = error_message(exc)
    if isinstance(exc, CudaError) and exc.is_final:
        control.send(message)
        os._exit(1)
    return message


def _refit(executable: Executable, message: bytes, memory: Memory, control: Channel) -> None:
    """Replace weights once the pool says that every device can."""

    def commit(change: Change) -> None:
        control.send(weights.PREPARED)
        if control.receive() != weights.COMMIT:
            raise _NotReadyError
        change()

    try:
        arrays = weights.read(executable.plan, message, memory)
        executable._refit(refitting.checked(executable.plan, arrays, _on_host), commit)  # noqa: SLF001 - of the same package
        control.send(weights.REPLACED)
    except _NotReadyError:
        control.send(weights.KEPT)
    except Exception as exc:  # noqa: BLE001 - the pool raises it
        control.send(_answer(exc, control))


class _NotReadyError(Exception):
    """Another device cannot replace the weights."""


def _on_host(value: Any, ordinal: int) -> Never:
    raise AssertionError((value, ordinal))
