"""MLServer as docs/serving.md starts it."""

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator

import pytest
from serving import Shop, answered, command, infer, request, stocked

URL = "http://127.0.0.1:8080/v2/models/digits"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return stocked(tmp_path_factory.mktemp("mlserver"), "mlserver")


@pytest.fixture(scope="module")
def server(shop: Shop) -> Iterator[subprocess.Popen[bytes]]:
    started = command("mlserver start")
    with shop.serving(started, shop.folder / "server.log", lambda: answered(f"{URL}/ready")[0] == 200) as process:
        yield process


@pytest.mark.usefixtures("server")
def test_the_example_of_the_document_reads_a_seven(shop: Shop) -> None:
    example = command("tritonclient", "python")
    changed = example.replace("8000", "8080").replace("_numpy(image)", "_numpy(image, binary_data=False)")
    (shop.folder / "example.py").write_text(changed)
    assert shop.run(".mlserver/bin/python example.py") == "[7]\n"


@pytest.mark.usefixtures("server")
def test_outputs_have_the_shapes_of_the_plan() -> None:
    status, body = infer(URL, 3)
    assert status == 200
    assert {output["name"]: output["shape"] for output in json.loads(body)["outputs"]} == {
        "digit": [3],
        "probabilities": [3, 10],
    }


WRONG = [
    ({"name": "picture"}, "inputs: ['picture'], expected ['image']"),
    ({"shape": [1, 8, 8]}, "input 'image': shape (1, 8, 8), expected (rows, 1, 8, 8)"),
    ({"datatype": "FP64"}, "input 'image': dtype float64, expected float32"),
    ({"shape": [2, 1, 8, 8]}, "input 'image': 64 values, its shape (2, 1, 8, 8) has 128"),
    ({"shape": [-1, 1, 8, 8]}, "input 'image': shape (-1, 1, 8, 8), expected whole numbers from 0"),
    ({"data": [0.5] * 63 + ["1"]}, "input 'image': \"1\" is no FP32"),
    ({"data": [0.5] * 63 + [None]}, "input 'image': null is no FP32"),
    ({"data": {}}, "float() argument must be a string or a real number, not 'dict'"),
]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("changes", "sentence"), WRONG)
def test_a_wrong_request_is_refused_in_a_sentence(changes: dict[str, object], sentence: str) -> None:
    status, body = infer(URL, 1, **changes)
    assert (status, json.loads(body)["error"]) == (400, sentence)


@pytest.mark.usefixtures("server")
def test_an_input_that_is_given_twice_is_refused() -> None:
    (given,) = json.loads(request(1))["inputs"]
    twice = json.dumps({"inputs": [given, {**given, "data": [0.25] * 64}]}).encode()
    status, body = answered(f"{URL}/infer", twice, Content_Type="application/json")
    assert (status, json.loads(body)["error"]) == (400, "input 'image' was given twice: give it once")


@pytest.mark.usefixtures("server")
def test_wrong_requests_harm_no_others_of_their_time() -> None:
    async def calls() -> list[tuple[int, str]]:
        given = [{}, *(changes for changes, _ in WRONG), {}] * 4
        return await asyncio.gather(*(asyncio.to_thread(infer, URL, 1, **changes) for changes in given))

    assert [status for status, _ in asyncio.run(calls())] == [200, *(400 for _ in WRONG), 200] * 4


@pytest.mark.usefixtures("server")
def test_every_request_of_many_clients_is_answered(shop: Shop) -> None:
    load = command("--seconds 10\n") + " --url 127.0.0.1:8080 --json-tensors"
    facts = json.loads(shop.run(load.replace(".ray", ".mlserver").replace("--seconds 10", "--seconds 4")))
    assert facts["right"] == facts["sent"] > 0
    text = answered("http://127.0.0.1:8082/metrics")[1]
    (count,) = re.findall(r'^model_infer_request_success_total{model="digits".*} (\S+)$', text, re.MULTILINE)
    assert float(count) >= facts["sent"]


def test_it_ends_in_order(shop: Shop, server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    assert server.wait(60) == 0
    assert "unclosed" not in (shop.folder / "server.log").read_text()
