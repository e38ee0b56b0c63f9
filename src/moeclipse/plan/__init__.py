"""Choosing layouts, orders and granularities with the simulator."""
