"""The passes of the optimiser."""
