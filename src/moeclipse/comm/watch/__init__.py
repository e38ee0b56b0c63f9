"""What ranks are doing, who is behind, and how the others learn of it."""
