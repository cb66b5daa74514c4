"""All Triton kernels in one network: nothing else is left where they serve, and the values stay."""

import torch
from families.bert import Bert
from rewriting import counts, optimize, run

from nimblec.kernels.gpu import SM_90
from nimblec.kernels.products.gemm_rewrite import use_triton_kernels
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.reductions.attention_rewrite import use_triton_attention
from nimblec.kernels.reductions.attention_tilings import AttentionTiling
from nimblec.kernels.reductions.norm_rewrite import NORM
from nimblec.optimize.passes.partition import partition
from nimblec.pytorch.aten_graph import trace

LAYERS = 3


def test_bert() -> None:
    torch.manual_seed(0)
    model = Bert(vocabulary=100, width=64, heads=4, layers=LAYERS).eval().half()
    inputs = torch.randint(0, 100, (2, 16)), torch.ones(2, 16, dtype=torch.int64)
    graph = trace(model, inputs).module
    expected, own = run(graph, *inputs), optimize(graph, device="cuda")
    use_triton_attention(own, lambda _: AttentionTiling(block_m=16, block_n=32))
    use_triton_kernels(own, lambda _: Tiling(block_m=16, block_n=16, block_k=32))
    NORM.use(own, lambda request: NORM.tilings(request, SM_90)[0], SM_90.trigger)
    found = counts(own)
    assert (found["attention"], found["layer_norm"], found["linear"]) == (LAYERS, 2 * LAYERS, 4 * LAYERS + 1)
    assert found["native_layer_norm"] == 1, "the embeddings' is generated together with them"
    assert len(partition(own)) == 2, "the embeddings and the mask"
    for result, wanted in zip(run(own, *inputs), expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=2e-2, rtol=2e-2)
