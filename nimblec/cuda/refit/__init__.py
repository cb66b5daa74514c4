"""Weights of a CUDA plan that can be replaced, though they were folded or laid out anew."""
