"""Record the launches of a model: two captures in different memory become a graph of tasks."""
