"""Kernels in Triton for every GPU (chapters 3, 7, 13, 15, 16 and 20).

A plan takes them for every call that the kernels of hopper/ refuse.
"""
