"""Runs a verified program over the stages of a model."""
