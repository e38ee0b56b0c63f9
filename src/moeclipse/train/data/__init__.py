"""From documents to samples and batches."""
