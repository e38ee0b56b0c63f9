"""What a step will take, before it runs."""
