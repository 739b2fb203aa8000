"""Training with artifacts: CheckpointState, Module, Optimizer, LinearLRScheduler, as in onnxruntime.training.api."""

from onnxgrad.ort_training.api.checkpoint_state import CheckpointState
from onnxgrad.ort_training.api.lr_scheduler import LinearLRScheduler
from onnxgrad.ort_training.api.module import Module
from onnxgrad.ort_training.api.optimizer import Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer"]
