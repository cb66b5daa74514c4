"""Our own Triton kernels for small batches, and the ops that launch them.

cuDNN's and cuBLAS's kernels for one image or one sentence fill few multiprocessors and walk a long
sum in each. These split the sum over many blocks, fetch their weights while the kernel before them
still runs, and have bias, residual and activation in their epilogue. Nothing here imports Triton
until a kernel is launched or compiled.
"""
