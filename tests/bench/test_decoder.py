"""The benchmark of a decoder step: its graph at -O2, the same tokens in all modes, and the table."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rewriting import counts

from bench import decoder
from bench.decoder_peer import MODES, TorchDecoder, generated, of_plan
from bench.models import llama_decoder
from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblec.kernels.gpu import SM_90
from nimblec.optimize import o2
from nimblec.optimize.pipeline import Runs, Setting
from nimblec.pytorch.model import place

STEPS = 20
SMALL = f"{llama_decoder.__name__}:small"


@pytest.mark.slow
def test_our_kernels_serve_the_step_and_write_the_cache_in_place() -> None:
    model, args = llama_decoder.step(llama_decoder.SMALL, torch.bfloat16)
    eager = copy.deepcopy(model)
    with torch.no_grad():
        runs = Runs(place(model, args, device="cpu"), Setting(device="cpu", use=o2.first(SM_90)))
        made = runs(*o2.TRITON_NORMS.pipelines)
        token = 1
        for position in range(STEPS):
            now = torch.tensor([token]), torch.tensor([position])
            wanted = eager(*now)
            for (_, tensor), value in zip(made.inputs, now, strict=True):
                tensor.copy_(value)
            token = int(made.run(lambda _source: None).argmax())
            assert token == int(wanted.argmax()), position
        for (name, found), (_, kept) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
            torch.testing.assert_close(found, kept, msg=name, rtol=2e-2, atol=2e-2)
    calls = counts(made.module)
    layers = llama_decoder.SMALL.layers
    assert calls["index_copy_"] == 2 * layers
    assert calls["attention"] == layers
    assert calls["linear"] + calls["linear_and_moments"] >= 4 * layers + 1
    assert not {"copy_", "clone", "index_copy", "scaled_dot_product_attention", "mm", "addmm"} & calls.keys()


def test_a_cache_that_is_an_input_generates_the_same() -> None:
    with torch.no_grad():
        found = [generated(TorchDecoder(SMALL, "cpu", given=given).next, STEPS) for given in (False, True)]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert len({*found[0]["tokens"]}) > STEPS // 2
    assert found[0]["logits"] == pytest.approx(found[1]["logits"], rel=1e-3)


def test_a_plan_says_what_touches_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(llama_decoder.SMALL, layers=1)  # exporting another takes as long
    monkeypatch.setattr(llama_decoder, "small", partial(llama_decoder.step, shape, torch.float32))
    options = Options(target="cpu", streams="1", plan_cache=None)
    figures = of_plan(compile_model(SMALL, options=options, observer=lambda *_: None).plan)
    assert figures["uses"] == {"in place": 2}
    assert sum(figures["writers"].values()) >= 2
    assert figures["launches"] > figures["own_launches"] == 0


def test_the_head_of_random_weights_is_as_sure_as_a_trained_one() -> None:
    model, _ = llama_decoder.step(llama_decoder.SMALL, torch.float32)
    with torch.no_grad():
        first, second = model(torch.tensor([5]), torch.tensor([0])).topk(2).values[0]
    assert first > 1.5 * second > 0


def spread(median: float) -> dict[str, float]:
    return {"p5": median, "median": median, "p95": median}


RESULTS: dict[str, Any] = {
    "environment": {"gpu": "none", "cpu": "x", "commit": "abc"},
    "models": {
        SMALL: {
            "O0": {"kernels_us": spread(20), "tokens": [1, 2, 3], "logits": [4.0, 4.0, 4.0], "launches": 9},
            "O2": {
                "kernels_us": spread(10),
                "call_us": spread(15),
                "token_us": spread(30),
                "noisy": ["call"],
                "tokens": [1, 2, 4],
                "logits": [4.0, 4.1, 4.0],
                "launches": 5,
                "own_launches": 4,
                "uses": {"in place": 4},
                "writers": {"aten.index_copy_.default": 4},
            },
            "given": {"failed": "no memory"},
        }
    },
}


def test_the_table_compares_tokens_and_logits_with_those_of_level_0() -> None:
    head, _, *lines, _, below = decoder.markdown(RESULTS).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    assert dict(zip(cells[0], cells[1], strict=True)) == {
        "model": "llama_decoder:small",
        "mode": "O2",
        "kernels_us": "10",
        "call_us": "~15",
        "token_us": "30",
        "launches / ours": "5 / 4",
        "equal tokens": "2 of 3",
        "logits, relative": "2.5e-02",
        "state": "4 in place",
        "written by": "4 aten.index_copy_.default",
    }
    assert cells[2][6] == "3 of 3"
    assert cells[3][1:4] == ["given", "-", "-"]
    assert below.startswith("Commit abc")


def test_every_mode_of_the_peer_is_measured() -> None:
    (jobs,) = decoder.table(decoder.parser().parse_args([])).jobs
    assert sorted(job.mode for job in jobs) == sorted(MODES)
    assert {job.model for job in jobs} == {"bench.models.llama_decoder:bf16"}
