"""The CUDA target: capture the kernels that the framework launches, as a graph of tasks."""
