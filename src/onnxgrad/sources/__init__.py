"""Data: tables, images, text and arrays, read as the inputs of a model and its loss."""

from onnxgrad.sources.read import read
from onnxgrad.sources.source import Arrays, Source, balanced_weights

__all__ = ["Arrays", "Source", "balanced_weights", "read"]
