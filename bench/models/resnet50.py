"""ResNet-50 (torchvision), random weights."""

import torchvision

from bench.models.images import batches, precisions

fp32, fp16 = precisions(torchvision.models.resnet50)
fp16_batch_4, fp16_batch_16, fp16_batch_64 = batches(fp16)
