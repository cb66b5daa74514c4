"""ConvNeXt-tiny (torchvision), random weights; layer scales as after training instead of 1e-6."""

from functools import partial

import torchvision

from bench.models.images import precisions

fp32, fp16 = precisions(partial(torchvision.models.convnext_tiny, layer_scale=0.1))
