"""The CUDA target: programs as CUDA graphs."""
