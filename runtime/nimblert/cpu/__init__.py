"""The CPU target: programs run by ONNX Runtime."""
