"""What each operator means: one file per forward operator, one typed NumPy function per gradient."""
