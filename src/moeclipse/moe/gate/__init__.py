"""Gates: which experts each token visits."""
