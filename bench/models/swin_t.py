"""Swin-T (torchvision), random weights."""

import torchvision

from bench.models.images import precisions

fp32, fp16 = precisions(torchvision.models.swin_t)
