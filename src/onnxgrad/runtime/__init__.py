"""The operators inside stock onnxruntime."""
