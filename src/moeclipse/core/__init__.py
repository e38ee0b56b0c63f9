"""Errors, configuration and logging: what every other room may use."""
