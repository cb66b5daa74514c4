"""Triton kernels for small batches: families in `products` and `reductions`, and what they share.

Libraries leave most multiprocessors idle at small batches. These kernels split sums over many blocks, fetch weights
while the kernel before still runs, and fuse bias, residual and activation. A family has a Triton template, torch ops
that launch it (with a reference for the CPU), tilings, and a rewrite; `nimblec.optimize.o2` lists the families. Nothing
here imports Triton until a kernel is launched or compiled.
"""
