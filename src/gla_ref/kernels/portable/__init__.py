"""Kernels in Triton for every GPU, and the plans that launch them (chapters 3, 7, 14, 15, 16 and 20)."""
