"""EfficientNet-B0 (torchvision), random weights."""

import torchvision

from bench.models.images import precisions

fp32, fp16 = precisions(torchvision.models.efficientnet_b0, settle=True)
