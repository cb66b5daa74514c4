"""EfficientNet-B5 (torchvision), random weights."""

import torchvision

from bench.models.images import precisions

fp32, fp16 = precisions(torchvision.models.efficientnet_b5, 456, settle=True)
