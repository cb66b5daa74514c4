"""The CPU target: the nodes that ONNX Runtime's optimiser leaves, each a kernel of its own."""
