"""The memory layout of tensors, chosen for the fastest kernels."""
