"""Gradients of pools."""
