"""The CUDA target: programs replayed as CUDA graphs."""
