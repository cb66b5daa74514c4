"""What each level of optimisation does to a model: its pipelines, and its variants."""
