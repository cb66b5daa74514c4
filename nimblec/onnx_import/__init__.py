"""Read ONNX files, and import their graphs."""
