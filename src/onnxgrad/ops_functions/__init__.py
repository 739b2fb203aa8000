"""ONNX functions too long to stand in the file of their operator, under the same name."""
