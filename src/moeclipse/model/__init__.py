"""The decoder transformer and its distribution over ranks."""
