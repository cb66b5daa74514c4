"""Kernels for attention, norms and pooling."""
