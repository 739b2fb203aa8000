"""Inputs of a training step's graph that say which slice of a batch this process has, where several train together."""

WEIGHTS = "loss_weights"  # what each term of the loss of these examples counts in the loss of the whole batch
PLACE = "place_in_batch"  # three integers, at these positions:
FIRST, COUNT, TAKES_PART = range(3)  # examples before these, how many they are, whether they count
