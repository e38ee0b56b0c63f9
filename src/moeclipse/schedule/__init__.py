"""Schedules as data: programs, their generators and their verifier."""
