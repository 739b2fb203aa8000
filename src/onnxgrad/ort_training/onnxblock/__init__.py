"""Blocks that build graphs: a loss on top of a model, the gradient of both, an optimizer, or operators of your own."""

from onnxgrad.ort_training.onnxblock import blocks, loss, optim
from onnxgrad.ort_training.onnxblock.blocks import Block
from onnxgrad.ort_training.onnxblock.checkpoint_utils import load_checkpoint_to_model, save_checkpoint
from onnxgrad.ort_training.onnxblock.model_accessor import base, custom_op_library, empty_base
from onnxgrad.ort_training.onnxblock.onnxblock import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
