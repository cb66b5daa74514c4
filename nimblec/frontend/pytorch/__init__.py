"""PyTorch models: modules, functions and exported programs, with the arguments of one call."""
