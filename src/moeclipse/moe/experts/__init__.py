"""Experts: what is computed on rows that have arrived."""
