"""Training on many processes, by MPI or torch.distributed: who has which examples, and what they add up."""
