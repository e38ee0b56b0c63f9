"""One step of one rank: microbatches, graphs, recompute, and checks of what came out."""
