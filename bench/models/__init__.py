"""The models that the benchmarks run: each callable returns (module, example_inputs)."""
