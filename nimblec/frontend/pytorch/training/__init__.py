"""Training steps of PyTorch models, as entries of a plan."""
