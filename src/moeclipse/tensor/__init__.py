"""Parallel linears and the one place where weight gradients reach main_grad."""
