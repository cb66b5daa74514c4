"""Record the kernels that a model launches, and make them relocatable."""
