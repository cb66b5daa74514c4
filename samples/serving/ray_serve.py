"""Serve a plan with Ray Serve: replicas, batches of concurrent requests, health, metrics, drain.

Usage: ``python samples/serving/ray_serve.py PLAN [--replicas 2]``; ``--help`` lists the rest. It speaks the Open
Inference Protocol, version 2, so Triton's clients can call it. Ctrl-C or SIGTERM ends it once all accepted requests are
answered.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oip
import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from ray import serve
from ray.serve import metrics
from ray.serve.config import HTTPOptions
from rows import Probe, Rows, count_rows, served_programs
from starlette.exceptions import HTTPException

import nimblert
from nimblert.check.verify import read_plan
from nimblert.plan import Target

MOST_ONGOING = 256
"""Requests in a replica at once; further ones wait in the proxy."""
api = FastAPI()

Arrays = dict[str, np.ndarray]


@api.exception_handler(HTTPException)
def refused(_request: Request, error: HTTPException) -> JSONResponse:
    """The protocol's answer to a request that is refused, which its clients show."""
    return JSONResponse({"error": error.detail}, error.status_code)


def _rows(calls: Sequence[Arrays]) -> int:
    return sum(map(count_rows, calls))


@serve.ingress(api)
class PlanServer:
    """One replica: a plan on one GPU or on the CPU."""

    def __init__(self, plan: str, name: str, wait_s: float) -> None:
        """``plan`` is a path; a batch waits ``wait_s`` seconds for rows to join it."""
        self._name = name
        self._model = nimblert.load(plan)
        self._plan = Rows(self._model)
        self._metadata = oip.metadata(name, self._plan.inputs, self._plan.outputs)
        self._probe = Probe(self._model)
        self._batch.set_max_batch_size(max(1, self._plan.batch))
        self._batch.set_batch_wait_timeout_s(wait_s)
        self._batches = metrics.Counter("nimblert_batches", description="Batches run")
        self._rows = metrics.Counter("nimblert_rows", description="Rows run, of all batches")
        self._seconds = metrics.Histogram(
            "nimblert_batch_seconds", description="Seconds of a batch", boundaries=[0.001, 0.01, 0.1, 1.0]
        )

    async def check_health(self) -> None:
        """Raise RuntimeError where outputs are not those at load; Ray then replaces this replica."""
        await asyncio.to_thread(self._probe.check)

    @serve.batch(batch_size_fn=_rows)
    async def _batch(self, calls: list[Arrays]) -> list[Arrays | nimblert.InputError]:
        return await self._run(calls)

    async def _run(self, calls: Sequence[Arrays]) -> list[Arrays | nimblert.InputError]:
        begin = time.perf_counter()
        outcomes = await asyncio.to_thread(self._plan.run_each, calls)
        self._seconds.observe(time.perf_counter() - begin)
        self._batches.inc()
        self._rows.inc(_rows(calls))
        return outcomes

    @api.get("/v2")
    def server(self) -> dict[str, Any]:
        """The protocol's server metadata."""
        return {"name": "nimblert", "version": nimblert.__version__, "extensions": ["binary_tensor_data"]}

    @api.get("/v2/health/live")
    @api.get("/v2/health/ready")
    def health(self) -> None:
        """A replica that answers is loaded."""

    @api.get("/v2/models/{name}")
    def metadata(self, name: str) -> dict[str, Any]:
        """The model's inputs and outputs."""
        self._check_name(name)
        return self._metadata

    @api.get("/v2/models/{name}/ready")
    def ready(self, name: str) -> None:
        """A replica that answers is loaded."""
        self._check_name(name)

    @api.post("/v2/models/{name}/infer")
    async def infer(self, name: str, request: Request) -> Response:
        """Outputs for inputs of any number of rows."""
        self._check_name(name)
        try:
            asked = oip.read_request(await request.body(), request.headers.get(oip.HEADER_LENGTH))
            count = self._plan.check(asked.arrays)  # before it is joined with other calls
            fits = count <= self._plan.batch
            outcome = await self._batch(asked.arrays) if fits else (await self._run([asked.arrays]))[0]
            if isinstance(outcome, nimblert.InputError):
                raise outcome
            body, headers = oip.write_response(name, asked, outcome)
        except (oip.ProtocolError, nimblert.InputError) as exc:
            raise HTTPException(400, str(exc)) from exc
        return Response(body, headers=headers)

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise HTTPException(404, f"model {name!r}: not found, this is {self._name!r}")


def application(plan: Path, *, name: str, replicas: int, wait_s: float) -> serve.Application:
    """Replicas of a plan, each with a GPU of its own, or one CPU for a CPU plan.

    Raises PlanError for a file that is no plan, InputError for a plan that cannot be served and for no replicas.
    """
    if replicas < 1:
        raise nimblert.InputError(f"--replicas {replicas}: expected 1 or more")
    read = read_plan(plan)
    served_programs(read, plan)
    needs = {"num_gpus": 1} if read.target is Target.CUDA else {"num_cpus": 1}
    deployment = serve.deployment(
        num_replicas=replicas,
        ray_actor_options=needs,
        max_ongoing_requests=MOST_ONGOING,
        health_check_period_s=1,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=30,
    )
    return deployment(PlanServer).bind(str(plan.absolute()), name, wait_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description="Serve a plan with Ray Serve.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--name", help="of the model, in URLs; by default that of the file")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--wait-ms", type=float, default=2.0, help="how long a batch waits for rows to join it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=8001, help="of Prometheus metrics")
    given = parser.parse_args(arguments)
    name = given.name or given.plan.stem
    try:
        served = application(given.plan, name=name, replicas=given.replicas, wait_s=given.wait_ms / 1000)
    except nimblert.NimbleError as exc:
        sys.exit(str(exc))
    ray.init(include_dashboard=False, log_to_driver=False, _metrics_export_port=given.metrics_port)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())  # instead of Ray's handlers
    serve.start(http_options=HTTPOptions(host=given.host, port=given.port))
    serve.run(served, name=name)
    where = f"http://{given.host}:{given.port}, metrics on port {given.metrics_port}"
    print(f"serving {name!r} on {where}, process {os.getpid()}", flush=True)
    ended.wait()
    serve.delete(name)  # waits until the replicas have answered what they accepted
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
