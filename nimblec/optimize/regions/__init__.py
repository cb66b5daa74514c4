"""Generated kernels for the calls between those of libraries."""
