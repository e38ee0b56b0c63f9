"""Triton kernels, nothing else: the files beside this package hold their references and launch them."""
