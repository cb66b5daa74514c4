"""AmoebaNet-A (Real et al., AAAI 2019, arXiv 1802.01548) for ImageNet as in Nimble, random weights, batch 1.

Nimble (Kwon et al., NeurIPS 2020) has the cells of the paper's first version as published by the authors of DARTS, in
the arrangement of DARTS.
"""

from bench.models.darts import DartsNetwork, precisions
from bench.models.searched_cells import Genotype

NORMAL = Genotype(
    edges=(
        *(("avg_pool_3x3", 0), ("max_pool_3x3", 1)),
        *(("sep_conv_3x3", 0), ("sep_conv_5x5", 2)),
        *(("sep_conv_3x3", 0), ("avg_pool_3x3", 3)),
        *(("sep_conv_3x3", 1), ("skip_connect", 1)),
        *(("skip_connect", 0), ("avg_pool_3x3", 1)),
    ),
    outputs=(4, 5, 6),
)
REDUCTION = Genotype(
    edges=(
        *(("avg_pool_3x3", 0), ("sep_conv_3x3", 1)),
        *(("max_pool_3x3", 0), ("sep_conv_7x7", 2)),
        *(("sep_conv_7x7", 0), ("avg_pool_3x3", 1)),
        *(("max_pool_3x3", 0), ("max_pool_3x3", 1)),
        *(("conv_1x7_then_7x1", 0), ("sep_conv_3x3", 5)),
    ),
    outputs=(3, 4, 6),
)

fp32_as_in_nimble, fp16_as_in_nimble = precisions(lambda: DartsNetwork(NORMAL, REDUCTION))
