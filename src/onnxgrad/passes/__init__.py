"""Passes, one per file: they change a model before it is differentiated, and on its way to a training step."""
