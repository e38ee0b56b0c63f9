"""The Mixture-of-Experts layer: gate, dispatch, experts, combine."""
