"""Kernels in Triton for every GPU (chapters 3, 7, 8, 9, 13, 15, 16, 20, 24 and 25).

A plan takes them for every call that the kernels of hopper/ refuse.
"""
