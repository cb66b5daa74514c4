"""The checks of a plan: its rules, the order of its commands, and the ONNX models in it."""
