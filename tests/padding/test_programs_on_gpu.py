"""Proofs for the CUDA target, of models that lie on the CPU here."""

from pathlib import Path
from typing import Any

import numpy as np
from sized_models import UNLIKE_ROWS, unlike_rows
from sized_modules import TOKENS, encoder

import nimblec
from nimblec.base.options import read_options
from nimblec.base.source import LiveModel
from nimblec.cuda.proofs import prove_programs
from nimblec.onnx_import.torch_model import load_onnx
from nimblec.pytorch import sources
from nimblec.pytorch.dynamic_export import export_dynamic
from nimblec.pytorch.model import place_call
from nimblert.plan import Fit


def test_module_is_proved_by_its_traced_graph() -> None:
    module, inputs, shapes = encoder()
    dims: dict[str, Any] = {"batch": (1, 2), "length": (8, 16)}
    examples = {"tokens": np.arange(TOKENS)[None]}
    given: dict[str, Any] = {"dims": dims, "examples": examples, "pad_masks": "attention_mask"}
    plan = nimblec.compile(module, inputs, target="cpu", dynamic_shapes=shapes, **given)
    options = read_options(**given)
    source = export_dynamic(LiveModel(model=module, args=inputs, kwargs={}, dynamic_shapes=shapes), options)
    calls = sources.dynamic_program(source, options).calls(options)
    proofs = prove_programs(plan, [place_call(call, device="cpu") for call in calls.values()])
    assert list(proofs) == [program.name for program in plan.programs]
    last = proofs["main[batch=2,length=16]"]
    assert {name: proof.fit for name, proof in last.items()} == {"batch": Fit.SPLIT, "length": Fit.PADDED}


def test_onnx_model_is_proved_by_its_imported_graph(tmp_path: Path) -> None:
    for what, (_, expected) in UNLIKE_ROWS.items():
        model = unlike_rows(tmp_path / "rows.onnx", what)
        plan = nimblec.compile(model, target="cpu", dims={"batch": (2, 4)})
        profiles = [program.profile for program in plan.programs]
        proofs = prove_programs(plan, [load_onnx(Path(model), device="cpu", profile=of) for of in profiles])
        found = {of["batch"].fit for of in proofs.values()}
        # A size that became a constant is for runs to find.
        assert found == {Fit.SPLIT if what == "divided by how many there are" else Fit[expected.upper()]}
