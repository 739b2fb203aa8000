"""Our operators as ONNX functions of standard operators, so that any ONNX runtime can run a model."""
