"""NASNet-A large, if the installed timm has it, random weights."""

from functools import partial

import timm

from bench.models.images import precisions

fp32, fp16 = precisions(partial(timm.create_model, "nasnetalarge"), 331, settle=True)
