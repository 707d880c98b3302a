"""Kernels that the book shows, and that no plan chooses: one calls them by their own names (chapter 14).

gla_chunk_fuse.py has the four kernels of the original GLA implementation, forward only, behind
`FORMS["gla"]["triton_chunk_fuse"]`.
"""
