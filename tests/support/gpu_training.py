"""Fixtures for tests that compare training steps on the GPU with eager PyTorch's."""

from collections.abc import Iterator

import pytest
import torch
import training_steps
from arithmetic import arithmetic


@pytest.fixture(scope="module")
def without_tf32() -> Iterator[None]:
    """Disable TF32, which the library may or may not choose."""
    with arithmetic("fp32"):
        yield


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Make eager's steps deterministic."""
    training_steps.deterministic()
    yield
    torch.use_deterministic_algorithms(mode=False)
