"""Inception-v3 (torchvision), random weights."""

from functools import partial

import torchvision

from bench.models.images import batches, precisions

fp32, fp16 = precisions(
    partial(torchvision.models.inception_v3, init_weights=False, transform_input=False), 299, settle=True
)
fp16_batch_4, fp16_batch_16, fp16_batch_64 = batches(fp16)
