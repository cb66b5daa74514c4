"""The checks of a plan: its structure, the proof of its width, and a comparison with ONNX Runtime."""
