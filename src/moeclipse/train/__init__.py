"""Data, optimizer, checkpoints, metrics and the loop."""
