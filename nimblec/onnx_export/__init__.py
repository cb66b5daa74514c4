"""Export PyTorch models to ONNX, for the CPU target."""
