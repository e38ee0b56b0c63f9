"""Discrete-event simulation of a program."""
