"""The levels of optimisation: the pipelines and the variants of each."""
