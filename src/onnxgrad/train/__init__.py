"""Training: losses, optimizers, schedules, and the trainer that uses them."""
