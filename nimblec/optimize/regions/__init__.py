"""What lies between the calls of libraries, as generated kernels."""
