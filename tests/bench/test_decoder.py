"""The benchmark of a decoder step: its graph at -O2, and the same tokens in all modes."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from calling import place
from rewriting import counts

from bench import decoder
from bench.decoder_peer import MODES, TorchDecoder, generated, of_plan
from bench.models import llama_decoder
from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblec.kernels.gpu import SM_90
from nimblec.optimize import o2
from nimblec.optimize.pipeline import Runs, Setting

STEPS = 20
SMALL = f"{llama_decoder.__name__}:small"


@pytest.mark.slow
def test_o2_kernels_write_the_cache_in_place() -> None:
    model, args = llama_decoder.step(llama_decoder.SMALL, torch.bfloat16)
    eager = copy.deepcopy(model)
    with torch.no_grad():
        runs = Runs(place(model, args), Setting(device="cpu", use=o2.first(SM_90)))
        made = runs(*o2.TRITON)
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
    assert calls["cached_attention"] == layers
    assert calls["linear"] + calls["linear_and_moments"] >= 4 * layers + 1
    assert not {"copy_", "clone", "index_copy", "index_copy_", "cat", "attention", "mm", "addmm"} & calls.keys()


def test_given_cache_generates_the_same_tokens() -> None:
    with torch.no_grad():
        found = [generated(TorchDecoder(SMALL, "cpu", given=given).next, STEPS) for given in (False, True)]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert len({*found[0]["tokens"]}) > STEPS // 2
    assert found[0]["logits"] == pytest.approx(found[1]["logits"], rel=1e-3)


def test_of_plan_counts_accesses_to_state(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(llama_decoder.SMALL, layers=1)  # exporting another takes as long
    monkeypatch.setattr(llama_decoder, "small", partial(llama_decoder.step, shape, torch.float32))
    options = Options(target="cpu", streams="1", plan_cache=None)
    figures = of_plan(compile_model(SMALL, options=options, observer=lambda *_: None).plan)
    assert figures["uses"] == {"in place": 2}
    assert sum(figures["writers"].values()) >= 2
    assert figures["launches"] > figures["own_launches"] == 0


def test_decoder_measures_every_mode_of_the_peer() -> None:
    by_model = decoder.table(decoder.parser().parse_args([])).jobs
    assert [sorted(job.mode for job in jobs) for jobs in by_model] == [sorted(MODES)] * len(decoder.MODELS)
