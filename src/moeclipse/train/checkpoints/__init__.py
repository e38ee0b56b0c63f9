"""Checkpoints: what is written, in which order, and how any layout reads it."""
