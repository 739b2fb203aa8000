"""Gradients of convolutions."""
