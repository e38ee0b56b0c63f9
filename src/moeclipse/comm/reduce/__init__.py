"""Sums over shared memory, and where they apply."""
