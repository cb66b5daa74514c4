"""Whether a plan is what it should be: its checks, its proof of width, and ONNX Runtime beside it."""
