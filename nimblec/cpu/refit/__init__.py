"""Weights of a CPU plan that can be replaced: those that it holds as the model has them, and recipes for the others."""
