"""ONNX models: read and checked, and translated to ATen calls."""
