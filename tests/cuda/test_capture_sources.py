"""Where in a model something happens or fails, and on which bytes, as far as it can be told without a GPU."""

from itertools import pairwise

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nimblec.cuda.capture.capture import describe_failure, pieces
from nimblec.pytorch.source_tracker import SourceTracker


class _Head(nn.Module):
    def __init__(self, tracker_log: list[str]) -> None:
        super().__init__()
        self.log = tracker_log
        self.tracker: SourceTracker | None = None
        self.inner = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.tracker is not None
        self.log.append(self.tracker.current)
        y = self.inner(x)
        self.log.append(self.tracker.current)
        if y.numel() == 3:
            reason = "three is refused\nwith details"
            raise RuntimeError(reason)
        return y


def _model() -> tuple[nn.Sequential, SourceTracker, list[str]]:
    log: list[str] = []
    model = nn.Sequential()
    model.add_module("body", nn.Identity())
    head = _Head(log)
    model.add_module("head", head)
    head.tracker = SourceTracker(model)
    return model, head.tracker, log


def test_the_path_of_the_running_module_is_known() -> None:
    model, tracker, log = _model()
    with tracker.following_modules():
        model(torch.zeros(2))
    assert log == ["head", "head"]
    assert (tracker.current, tracker.failed) == ("", "")


def test_a_failure_names_line_and_module() -> None:
    model, tracker, _ = _model()
    with tracker.following_modules(), pytest.raises(RuntimeError) as caught:
        model(torch.zeros(3))
    assert (tracker.current, tracker.failed) == ("", "head")
    sentence = describe_failure(caught.value, tracker)
    assert sentence.startswith("raise RuntimeError(reason) (test_capture_sources.py, line ")
    assert "in head: three is refused;" in sentence
    assert "details" not in sentence


def test_hooks_are_gone_afterwards() -> None:
    model, tracker, _ = _model()
    with tracker.following_modules():
        pass
    assert not torch.nn.modules.module._global_forward_hooks
    tracker.set("Conv 'c'")
    model(torch.zeros(2))
    assert tracker.current == "Conv 'c'"


@examples(200)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
)
def test_the_pieces_of_a_tensor_are_its_elements(data: st.DataObject, sizes: list[int], steps: list[int]) -> None:
    whole = torch.arange(torch.Size(n * s for n, s in zip(sizes, steps, strict=False)).numel())
    whole = whole.view([n * s for n, s in zip(sizes, steps, strict=False)])
    part = whole[tuple(slice(0, n * s, s) for n, s in zip(sizes, steps, strict=False))]
    part = part.permute(data.draw(st.permutations(range(part.dim()))))
    found = pieces(part.shape, part.stride(), most=4**4)
    assert [n for first, end in found for n in range(first, end)] == sorted(part.flatten().tolist())
    assert all(end < first for (_, end), (first, _) in pairwise(found))
    assert pieces(part.shape, part.stride(), most=1) == [(0, found[-1][1])]


def test_a_tensor_that_lies_over_itself_is_one_piece() -> None:
    x = torch.arange(6)
    assert pieces(x.expand(4, 6).shape, x.expand(4, 6).stride(), most=99) == [(0, 6)]
    assert pieces((3, 4), (2, 1), most=99) == [(0, 8)]
