"""Weights of a CUDA plan that can be replaced though they were folded or repacked."""
