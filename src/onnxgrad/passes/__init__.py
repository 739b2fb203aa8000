"""What changes a model, one pass a file: before it is differentiated, and on its way into a training step."""
