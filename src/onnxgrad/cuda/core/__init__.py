"""What the CUDA kernels share."""
