"""Ranks, groups, lanes and exchanges."""
