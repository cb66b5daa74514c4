"""MobileNetV3-large (torchvision), random weights."""

import torchvision

from bench.models.images import precisions

fp32, fp16 = precisions(torchvision.models.mobilenet_v3_large, settle=True)
