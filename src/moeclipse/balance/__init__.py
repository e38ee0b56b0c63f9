"""Who holds which expert: pure policies."""
