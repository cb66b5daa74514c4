"""Ray Serve as docs/serving.md starts it: answers, batches, metrics, a killed replica, drain."""

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from serving import Shop, answered, command, infer, request, stocked
from subprocesses import ROOT

from nimblec.plan import encoder
from nimblert.check.verify import read_plan

URL = "http://127.0.0.1:8000/v2/models/digits"
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return stocked(tmp_path_factory.mktemp("ray"), "ray")


@pytest.fixture(scope="module")
def server(shop: Shop) -> Iterator[subprocess.Popen[bytes]]:
    log = shop.folder / "server.log"
    with shop.serving(command("ray_serve.py digits.plan"), log, lambda: b"\nserving" in log.read_bytes()) as started:
        yield started


def test_it_says_where_it_is(shop: Shop, server: subprocess.Popen[bytes]) -> None:
    line = f"\nserving 'digits' on http://127.0.0.1:8000, metrics on port 8001, process {server.pid}\n"
    assert line in (shop.folder / "server.log").read_text()


@pytest.mark.usefixtures("server")
def test_the_example_of_the_document_reads_a_seven(shop: Shop) -> None:
    (shop.folder / "example.py").write_text(command("tritonclient", "python"))
    assert shop.run(".ray/bin/python example.py") == "[7]\n"


@pytest.mark.usefixtures("server")
def test_it_speaks_the_protocol() -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/digits/ready"):
        assert answered(f"http://127.0.0.1:8000{path}")[0] == 200
    assert json.loads(answered("http://127.0.0.1:8000/v2")[1])["extensions"] == ["binary_tensor_data"]
    assert json.loads(answered(URL)[1])["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    status, body = answered("http://127.0.0.1:8000/v2/models/letters")
    assert (status, json.loads(body)) == (404, {"error": "model 'letters': not found, this is 'digits'"})


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("rows", [1, 3, 8, 30])
def test_any_number_of_rows_is_answered(rows: int) -> None:
    status, body = infer(URL, rows)
    outputs = {output["name"]: output for output in json.loads(body)["outputs"]}
    assert status == 200
    assert (outputs["digit"]["shape"], outputs["probabilities"]["shape"]) == ([rows], [rows, 10])
    values = np.reshape(outputs["probabilities"]["data"], (rows, 10))
    np.testing.assert_allclose(values, np.tile(values[:1], (rows, 1)), rtol=1e-5)
    np.testing.assert_allclose(values.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "picture"}, "inputs: ['picture'], expected ['image']"),
        ({"shape": [1, 8, 8]}, "input 'image': shape (1, 8, 8), expected (rows, 1, 8, 8)"),
        ({"shape": [2, 1, 8, 8]}, "input 'image': 64 values, its shape (2, 1, 8, 8) has 128"),
        ({"datatype": "FP64"}, "input 'image': dtype float64, expected float32"),
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence(changes: dict[str, object], sentence: str) -> None:
    status, body = infer(URL, 1, **changes)
    assert (status, json.loads(body)) == (400, {"error": sentence})


@pytest.mark.usefixtures("server")
def test_concurrent_requests_run_as_batches(shop: Shop) -> None:
    facts = json.loads(shop.run(command("--seconds 10\n").replace("--seconds 10", "--seconds 4")))
    assert (facts["errors"], facts["wrong"], facts["lost"]) == ({}, 0, 0)
    assert facts["right"] == facts["sent"] > 0
    assert {"p50_ms", "p99_ms", "throughput"} <= facts.keys()
    deadline = time.monotonic() + 60
    # Each replica reports its metrics from time to time.
    while True:
        text = answered("http://127.0.0.1:8001")[1]
        rows, batches, timed = (metric(text, name) for name in ("rows_total", "batches_total", "batch_seconds_count"))
        # Requests have one to three rows.
        if rows > facts["sent"] and 0 < batches == timed:
            break
        assert time.monotonic() < deadline, (rows, batches, timed)
        time.sleep(0.5)
    assert batches < rows / 2


def metric(text: str, name: str) -> float:
    """Return the sum of a metric over the replicas."""
    return sum(map(float, re.findall(rf"^ray_nimblert_{name}{{.*}} (\S+)$", text, re.MULTILINE)))


def test_a_killed_replica_loses_no_request_without_an_error(shop: Shop, server: subprocess.Popen[bytes]) -> None:
    facts = json.loads(shop.run(command("--kill").replace("4711", str(server.pid))))
    assert facts["right"] + sum(facts["errors"].values()) == facts["sent"]
    assert (facts["wrong"], facts["lost"]) == (0, 0)
    assert facts["errors_until_s"] < 5
    assert facts["killed"] not in facts["replicas"]
    assert len(facts["replicas"]) == 2
    assert facts["replaced_after_s"] < 30
    assert facts["right"] > 50


def test_what_was_accepted_is_answered_before_the_end(shop: Shop, server: subprocess.Popen[bytes]) -> None:
    rows = 20_000
    call = partial(answered, f"{URL}/infer", request(rows), Content_Type="application/json")
    begin = time.monotonic()
    assert call()[0] == 200
    half = (time.monotonic() - begin) / 2
    found: list[tuple[int, str]] = []
    caller = threading.Thread(target=lambda: found.append(call()))
    caller.start()
    time.sleep(half)
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    caller.join(60)
    ((status, body),) = found
    assert status == 200
    assert json.loads(body)["outputs"][0]["shape"] == [rows]
    assert "Traceback" not in (shop.folder / "server.log").read_text()
    assert answered(URL)[0] == 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("missing.plan", "missing.plan: no such file"),
        ("samples/digit_7.npy", "samples/digit_7.npy: is not a plan file, it looks like a NumPy array"),
        ("digits.plan --replicas 0", "--replicas 0: expected 1 or more"),
        (
            "entries.plan",
            "entries.plan: has the entries ['one', 'two'], only one is served: compile it alone, or name it 'main'",
        ),
        ("flat.plan", "flat.plan: expected a batch as the first dimension of every input and output"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(shop: Shop, given: str, sentence: str) -> None:
    with_entries(shop, "one", "two")
    without_rows(shop)
    found = shop.run(f"! .ray/bin/python samples/serving/ray_serve.py {given} 2>&1")
    assert found == f"{sentence}\n"


def with_entries(shop: Shop, *names: str) -> None:
    """Write entries.plan: the digits, whose first programs are entries of these names."""
    plan = read_plan(shop.folder / "digits.plan")
    programs = tuple(replace(program, entry=name, fits=()) for program, name in zip(plan.programs, names, strict=False))
    encoder.write(replace(plan, programs=programs), shop.folder / "entries.plan")


def without_rows(shop: Shop) -> None:
    """Write flat.plan, whose first dimension differs between inputs and outputs."""
    plan = read_plan(shop.folder / "digits.plan")
    (image,) = plan.programs[0].inputs
    flat = replace(image, shape=(8, 8), strides=(8, 1))
    program = replace(plan.programs[0], inputs=(flat,), profile=(), fits=())
    encoder.write(replace(plan, programs=(program,)), shop.folder / "flat.plan")


NEEDS = """
import sys
sys.path.insert(0, "samples/serving")
from pathlib import Path
import ray_serve
for plan in sys.argv[1:]:
    application = ray_serve.application(Path(plan), name="x", replicas=2, wait_s=0)
    print(application._bound_deployment.num_replicas, application._bound_deployment.ray_actor_options)
"""

HEALTH = """
import asyncio, sys
sys.path.insert(0, "samples/serving")
import nimblert, ray_serve
from rows import Probe
server = ray_serve.PlanServer.__new__(ray_serve.PlanServer)
server._probe = Probe(nimblert.load(sys.argv[1]))
asyncio.run(server.check_health())
server._probe._inputs["image"] += 1
try:
    asyncio.run(server.check_health())
except RuntimeError as exc:
    print(exc)
"""


def test_a_replica_takes_a_gpu_where_the_plan_runs_on_one(shop: Shop) -> None:
    (shop.folder / "needs.py").write_text(NEEDS)
    block = ROOT / "tests" / "data" / "triton_block.plan"
    with_entries(shop, "main", "other")
    cpu, entries, cuda = shop.run(f".ray/bin/python needs.py digits.plan entries.plan {block}").splitlines()
    assert cpu == entries == "2 {'num_cpus': 1}"
    assert cuda.startswith("2 {'num_gpus': 1")


def test_replica_is_unhealthy_if_outputs_differ(shop: Shop) -> None:
    (shop.folder / "health.py").write_text(HEALTH)
    assert " is not what it was at load" in shop.run(".ray/bin/python health.py digits.plan")
