"""Weights in and out: folders, checkpoints, adapters, upcycling."""
