"""Hardware as data, and seconds per op."""
