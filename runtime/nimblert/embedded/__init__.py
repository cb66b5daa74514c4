"""The ONNX models that CPU plans hold as kernels: reading them, and the rules that they must keep."""
