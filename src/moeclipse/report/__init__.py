"""What a run tells: hidden and exposed time, and its page."""
