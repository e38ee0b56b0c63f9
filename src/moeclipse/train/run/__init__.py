"""A run: its directory, its loop over steps, what it settles before and writes down after."""
