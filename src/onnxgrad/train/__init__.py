"""Training: losses, optimizers, schedules, and the trainer that puts them to work."""
