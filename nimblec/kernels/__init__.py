"""Triton kernels for small batches: families in `products` and `reductions`, and what they share.

For one image or one sentence, cuDNN's and cuBLAS's kernels occupy few multiprocessors, each with a long
sum. These kernels split the sum over many blocks, fetch their weights while the kernel before them
still runs, and have bias, residual and activation in their epilogue. Nothing here imports Triton
until a kernel is launched or compiled.

A family has a Triton template, torch ops that launch it (with a reference for the CPU), tilings to
choose from, and a rewrite that puts the ops into a graph. `nimblec.optimize.o2` lists them.
"""
