"""MobileViT-S (timm), random weights."""

from functools import partial

import timm

from bench.models.images import precisions

fp32, fp16 = precisions(partial(timm.create_model, "mobilevit_s"), 256)
