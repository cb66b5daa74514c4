"""Read cubins, and cut them down to the kernels that a plan launches."""
