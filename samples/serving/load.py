"""Load test of a server of the Open Inference Protocol: many clients at once, every request accounted for.

Usage: ``python samples/serving/load.py MODEL [--url 127.0.0.1:8000] [--clients 16] [--seconds 10]``. MLServer needs
``--json-tensors``. ``--kill PID``, of a ray_serve.py on this machine, kills one of its replicas half way (SIGKILL).

Random inputs follow the server's model metadata; outputs are compared with those of a call made alone. Prints JSON:
requests sent, answered correctly, failed, answered wrongly, and lost (no answer within the time limit); latencies and
throughput. The exit status is 1 if any answer was wrong or lost.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import tritonclient.http.aio as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

LIMIT_S = 30.0
"""A request without an end after so many seconds is lost."""
SAMPLES = 12
REPLICA = b"ray::ServeReplica"

Arrays = dict[str, np.ndarray]


@dataclass(kw_only=True)
class Account:
    """The outcomes of the requests of one client, or of all."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    last_error: float = 0.0
    sent: int = 0
    wrong: int = 0
    lost: int = 0


class Client:
    """Calls the model, from any number of tasks."""

    def __init__(
        self, client: triton.InferenceServerClient, model: str, metadata: dict[str, Any], *, binary: bool
    ) -> None:
        self._client = client
        self._model = model
        self._metadata = metadata
        self._binary = binary
        self._headers = None if binary else {"Content-Type": "application/json"}

    async def call(self, arrays: Arrays) -> Arrays:
        """The outputs. Raises TimeoutError, InferenceServerException, aiohttp.ClientError."""
        inputs = []
        for tensor in self._metadata["inputs"]:
            array = arrays[tensor["name"]]
            inputs.append(triton.InferInput(tensor["name"], array.shape, tensor["datatype"]))
            inputs[-1].set_data_from_numpy(array, binary_data=self._binary)
        names = [tensor["name"] for tensor in self._metadata["outputs"]]
        wanted = [triton.InferRequestedOutput(name, binary_data=self._binary) for name in names]
        async with asyncio.timeout(LIMIT_S):
            result = await self._client.infer(self._model, inputs, outputs=wanted, headers=self._headers)
        return {name: result.as_numpy(name) for name in names}

    def drawn(self, seed: int) -> Arrays:
        """Inputs of one to three rows."""
        random = np.random.default_rng(seed)
        shapes = {t["name"]: (1 + seed % 3, *t["shape"][1:]) for t in self._metadata["inputs"]}
        dtypes = {t["name"]: np.dtype(triton_to_np_dtype(t["datatype"])) for t in self._metadata["inputs"]}
        return {
            name: random.standard_normal(shape).astype(dtypes[name])
            if dtypes[name].kind == "f"
            else random.integers(0, 2, shape).astype(dtypes[name])
            for name, shape in shapes.items()
        }


def _same(found: Arrays, expected: Arrays) -> bool:
    """Whether outputs agree; a larger batch may sum in another order."""
    return all(
        found[name].shape == array.shape and np.allclose(found[name], array, rtol=1e-3, atol=1e-5)
        for name, array in expected.items()
    )


async def _repeat(client: Client, samples: Sequence[tuple[Arrays, Arrays]], first: int, end: float) -> Account:
    """Call until ``end``, one call after the other."""
    account = Account()
    while time.monotonic() < end:
        inputs, expected = samples[(first + account.sent) % len(samples)]
        account.sent += 1
        begin = time.monotonic()
        try:
            found = await client.call(inputs)
        except TimeoutError:
            account.lost += 1
        except (InferenceServerException, aiohttp.ClientError) as exc:
            account.errors[_described(exc)] += 1
            account.last_error = time.monotonic()
        else:
            account.seconds.append(time.monotonic() - begin)
            account.wrong += not _same(found, expected)
    return account


def _described(error: Exception) -> str:
    status = error.status() if isinstance(error, InferenceServerException) else None
    return f"HTTP {status}" if status else type(error).__name__


def replicas(server: int) -> list[int]:
    """The replicas among the descendants of a process, known by their titles."""
    return sorted(pid for pid in _below(server) if _read(f"/proc/{pid}/cmdline").startswith(REPLICA))


def _below(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(file).split()):
            yield child
            yield from _below(child)


def _read(file: str | Path) -> bytes:
    """The content of a file of /proc; empty once the process has ended."""
    with suppress(OSError):
        return Path(file).read_bytes()
    return b""


async def _replace(server: int, seconds: float) -> dict[str, Any]:
    """Kill a replica after so many seconds: its process, and the processes of all once it is replaced."""
    before = replicas(server)
    await asyncio.sleep(seconds)
    os.kill(before[0], signal.SIGKILL)
    begin = time.monotonic()
    end = begin + LIMIT_S
    while len(now := set(replicas(server)) - {before[0]}) < len(before) and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.1)  # nothing announces a new process
    return {"killed": before[0], "replicas": sorted(now), "replaced_after_s": round(time.monotonic() - begin, 2)}


async def load(
    url: str, model: str, *, clients: int, seconds: float, binary: bool, server: int | None
) -> dict[str, Any]:
    """Call for so long, and return the outcomes; with ``server``, kill one of its replicas half way."""
    async with triton.InferenceServerClient(url, conn_limit=clients) as connection:
        client = Client(connection, model, await connection.get_model_metadata(model), binary=binary)
        samples = [(inputs, await client.call(inputs)) for inputs in map(client.drawn, range(SAMPLES))]
        begin = time.monotonic()
        killing = None if server is None else asyncio.create_task(_replace(server, seconds / 2))
        tasks = [_repeat(client, samples, first, begin + seconds) for first in range(clients)]
        accounts = await asyncio.gather(*tasks)
        passed = time.monotonic() - begin
    latencies = np.array([second for account in accounts for second in account.seconds])
    wrong = sum(account.wrong for account in accounts)
    facts: dict[str, Any] = {
        "sent": sum(account.sent for account in accounts),
        "right": latencies.size - wrong,
        "errors": dict(sum((account.errors for account in accounts), Counter[str]())),
        "wrong": wrong,
        "lost": sum(account.lost for account in accounts),
        "seconds": round(passed, 3),
        "throughput": round(latencies.size / passed, 1),
        **{f"p{q}_ms": round(float(np.percentile(latencies, q)) * 1000, 2) for q in (50, 99) if latencies.size},
    }
    if killing is not None:
        last_error = max(account.last_error for account in accounts)
        facts["errors_until_s"] = round(max(0.0, last_error - begin - seconds / 2), 3)
        facts |= await killing
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the outcomes; 0 if every request was answered correctly or failed with an error."""
    parser = argparse.ArgumentParser(description="Call a model of a server and account for every request.")
    parser.add_argument("model")
    parser.add_argument("--url", default="127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json-tensors", action="store_true", help="for servers without the binary extension")
    parser.add_argument("--kill", type=int, metavar="PID", help="of a ray_serve.py whose replica to kill half way")
    given = parser.parse_args(arguments)
    binary = not given.json_tensors
    facts = asyncio.run(
        load(given.url, given.model, clients=given.clients, seconds=given.seconds, binary=binary, server=given.kill)
    )
    print(json.dumps(facts, indent=2))
    accounted = facts["right"] + sum(facts["errors"].values()) == facts["sent"]
    return 0 if accounted and not facts["wrong"] and not facts["lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
