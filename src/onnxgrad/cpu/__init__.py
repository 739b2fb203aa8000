"""How each operator is computed on the CPU: Numba kernels, in files and functions named as in ops/."""
