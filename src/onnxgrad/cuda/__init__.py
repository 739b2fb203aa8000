"""How the operators run on NVIDIA GPUs: Triton kernels on torch tensors, in files named as those of ops/."""
