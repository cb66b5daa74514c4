"""What tests of Triton kernels share."""

import pytest
import torch

from nimblec.kernels.gpu import GPU


@pytest.fixture
def hopper() -> None:
    """Skip GPUs on which our kernels are not used; seed torch."""
    if not GPU.current().has_programmatic_launch:
        pytest.skip("needs compute capability 9.0: programmatic dependent launch")
    torch.manual_seed(0)
