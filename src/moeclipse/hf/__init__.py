"""Folders of Hugging Face models: configurations, names of tensors, weights in and out."""
