"""GoogLeNet (torchvision), random weights."""

from functools import partial

import torchvision

from bench.models.images import precisions

fp32, fp16 = precisions(partial(torchvision.models.googlenet, init_weights=False, transform_input=False))
