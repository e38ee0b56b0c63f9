"""The optimizer: buckets of parameters, shards, and their update."""
