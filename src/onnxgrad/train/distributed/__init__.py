"""Training on many processes by MPI: who has which examples, and what they add up."""
