"""ResNet-101 (torchvision), random weights."""

import torchvision

from bench.models.images import precisions

fp32, fp16 = precisions(torchvision.models.resnet101, settle=True)
