"""Closed forms of the gradients, as the kernels compute them (chapters 15 and 20)."""
