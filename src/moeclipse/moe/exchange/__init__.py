"""The exchange: which row goes to whom, there and back."""
