"""Plans for several sizes on a GPU: padded and split calls, from and to the host and the device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import restless_times
import torch
from sized_models import UNLIKE_ROWS, unlike_rows
from sized_modules import TOKENS, encoder, images

import nimblec
import nimblert
from nimblert.executable import Executable
from nimblert.plan import Fit

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[torch.nn.Module, Executable]]:
    """Yield a convolutional network, and its plan for batches of 1 to 16."""
    module, inputs, shapes = images()
    options: dict[str, Any] = {"target": "cuda", "precision": "fp32", "dynamic_shapes": shapes}
    plan = nimblec.compile(module, inputs, dims={"batch": "1..16"}, **options)
    assert [dict(p.profile)["batch"] for p in plan.programs] == [1, 2, 4, 8, 16]
    assert {program.fits for program in plan.programs} == {(Fit.SPLIT,)}
    assert plan.arena_nbytes == max(p.arena_nbytes for p in plan.programs)
    alone = nimblec.compile(module, inputs, dims={"batch": 16}, **options)
    assert plan.weights_nbytes < 2 * alone.weights_nbytes  # tilings, and so repacked weights, differ by size
    with nimblert.load(plan) as executable:
        yield module, executable


SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 50)


@pytest.mark.parametrize("rows", SIZES)
def test_numpy_arrays_of_any_batch(network: tuple[torch.nn.Module, Executable], rows: int) -> None:
    module, executable = network
    x = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        expected = module(x).numpy()
    np.testing.assert_allclose(executable(x.numpy()), expected, rtol=1e-3, atol=1e-4)
    out = np.zeros((rows, 10), np.float32)
    executable.run({"input": x.numpy()}, out={executable.outputs[0].name: out})
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_arrays_on_the_device_of_any_batch(
    network: tuple[torch.nn.Module, Executable], rows: int, memory_format: torch.memory_format
) -> None:
    module, executable = network
    x = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        expected = module(x)
    found = torch.from_dlpack(executable(x.cuda().to(memory_format=memory_format)))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)
    out = torch.zeros(rows, 10, device="cuda")
    executable.run({"input": x.cuda()}, out={executable.outputs[0].name: out})
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("on_device", [False, True])
def test_an_encoder_of_any_length(on_device: bool) -> None:
    module, inputs, shapes = encoder()
    plan = nimblec.compile(
        module,
        inputs,
        target="cuda",
        dynamic_shapes=shapes,
        dims={"batch": (1, 4), "length": (8, 32)},
        pad_masks="attention_mask",
    )
    assert {program.fits for program in plan.programs} == {(Fit.SPLIT, Fit.PADDED)}
    with torch.no_grad(), nimblert.load(plan, warm=True) as executable:
        for batch, length in ((1, 1), (1, 8), (2, 9), (4, 31), (9, 5), (4, 32)):
            generator = torch.Generator().manual_seed(batch)
            tokens = torch.randint(TOKENS, (batch, length), generator=generator)
            mask = torch.randint(2, (batch, length), generator=generator)
            mask[:, 0] = 1
            given = [t.cuda() if on_device else t.numpy() for t in (tokens, mask)]
            for output, expected in zip(executable(*given), module(tokens, mask), strict=True):
                found = torch.from_dlpack(output).cpu() if on_device else torch.from_numpy(output)
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_programs_keep_their_kernels_while_others_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 32 tokens and four of 8 have kernels of one source."""
    restless_times.begin(monkeypatch)
    module, inputs, shapes = encoder()
    dims = {"batch": (1, 4), "length": (8, 32)}
    plan = nimblec.compile(module, inputs, target="cuda", level=1, dynamic_shapes=shapes, dims=dims)
    assert len(plan.programs) == 4


@pytest.mark.parametrize("what", UNLIKE_ROWS)
def test_runs_find_out_which_sizes_a_program_serves(tmp_path: Path, what: str) -> None:
    plan = nimblec.compile(unlike_rows(tmp_path / "rows.onnx", what), target="cuda", dims={"batch": (1, 2, 8)})
    assert {fit for program in plan.programs for fit in program.fits} == {Fit[UNLIKE_ROWS[what][1].upper()]}
