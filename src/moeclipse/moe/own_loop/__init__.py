"""The layer in a training loop of one's own: gradients, clipping, checkpoints, wrappers."""
