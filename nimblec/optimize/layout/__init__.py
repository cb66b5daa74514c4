"""Where tensors lie in memory, so that fast kernels read them as they are."""
