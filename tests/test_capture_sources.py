"""Where in a model something happens or fails, as far as it can be told without a GPU."""

import pytest
import torch
from torch import nn

from nimblec.cuda.capture import SourceTracker, describe_failure


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
