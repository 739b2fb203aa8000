"""Operators for onnx.reference, whose own are wrong, slow, or not there."""
