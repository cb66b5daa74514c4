"""ATen graphs: how to read and change them, and the vocabulary that passes and kernels share."""
