"""Ray Serve as docs/serving.md starts it: answers, batches, metrics, a killed replica, drain."""

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from serving import Shop, answered, command, commands, environment

URL = "http://127.0.0.1:8000/v2/models/digits"
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    environment("ray")
    made = Shop(tmp_path_factory.mktemp("ray"))
    made.run(command("nimblec compile"))
    return made


@pytest.fixture(scope="module")
def server(shop: Shop) -> Iterator[subprocess.Popen[bytes]]:
    log = shop.folder / "server.log"
    with shop.serving(command("ray_serve.py digits.plan"), log, lambda: b"\nserving" in log.read_bytes()) as started:
        yield started


def infer(rows: int, **changes: object) -> tuple[int, str]:
    """One call, with changes to the tensor that it sends."""
    tensor = {"name": "image", "shape": [rows, 1, 8, 8], "datatype": "FP32", "data": [0.5] * (64 * rows), **changes}
    return answered(f"{URL}/infer", json.dumps({"inputs": [tensor]}).encode())


def test_it_says_where_it_is(shop: Shop, server: subprocess.Popen[bytes]) -> None:
    line = f"\nserving 'digits' on http://127.0.0.1:8000, metrics on port 8001, process {server.pid}\n"
    assert line in (shop.folder / "server.log").read_text()


@pytest.mark.usefixtures("server")
def test_the_example_of_the_document_reads_a_seven(shop: Shop) -> None:
    (example,) = commands("python")
    (shop.folder / "example.py").write_text(example)
    assert shop.run(".ray/bin/python example.py") == "[7]\n"


@pytest.mark.usefixtures("server")
def test_it_speaks_the_protocol() -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/digits/ready"):
        assert answered(f"http://127.0.0.1:8000{path}")[0] == 200
    assert json.loads(answered("http://127.0.0.1:8000/v2")[1])["extensions"] == ["binary_tensor_data"]
    assert json.loads(answered(URL)[1])["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert answered("http://127.0.0.1:8000/v2/models/letters")[0] == 404


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("rows", [1, 3, 8, 30])
def test_any_number_of_rows_is_answered(rows: int) -> None:
    status, body = infer(rows)
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
    status, body = infer(1, **changes)
    assert (status, json.loads(body)["detail"]) == (400, sentence)


@pytest.mark.usefixtures("server")
def test_concurrent_requests_run_as_batches(shop: Shop) -> None:
    facts = json.loads(shop.run(command("--seconds 10\n").replace("--seconds 10", "--seconds 4")))
    assert (facts["errors"], facts["wrong"], facts["lost"]) == ({}, 0, 0)
    assert facts["right"] == facts["sent"] > 0
    assert {"p50_ms", "p99_ms", "throughput"} <= facts.keys()
    deadline = time.monotonic() + 60
    while metric("rows") < facts["sent"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert metric("rows") > facts["sent"]  # of one to three rows each
    assert 0 < metric("batches") < metric("rows") / 3
    assert metric("batch_seconds_count") == metric("batches")


def metric(name: str) -> float:
    """The sum of a metric over the replicas."""
    text = answered("http://127.0.0.1:8001")[1]
    return sum(map(float, re.findall(rf"^ray_nimblert_{name}(?:_total)?{{.*}} (\S+)$", text, re.MULTILINE)))


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
    begin = time.monotonic()
    assert infer(rows)[0] == 200
    half = (time.monotonic() - begin) / 2
    found: list[tuple[int, str]] = []
    caller = threading.Thread(target=lambda: found.append(infer(rows)))
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
