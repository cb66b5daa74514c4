"""Record what a model launches: two captures in different memory become a graph of tasks."""
