"""The CUDA target: the kernels that the framework launches, captured as a graph of tasks."""
