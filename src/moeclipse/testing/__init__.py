"""Helpers for tests that need several ranks; imported by tests alone."""
