"""What is under way between ranks, and how it is waited for and recorded."""
