"""What the CPU kernels share: compiling and caching, threads, half-precision numbers, matrix products."""
