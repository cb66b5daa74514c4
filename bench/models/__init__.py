"""The models of the benchmarks; each callable returns (module, example_inputs)."""
