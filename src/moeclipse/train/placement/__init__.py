"""Where experts live during a run, and how they move."""
