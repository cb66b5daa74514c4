"""The ONNX models that a plan for the CPU holds as its kernels, and what they must keep to."""
