"""Triton kernels, one mechanism a file (chapter 9); they need Triton, and a GPU or TRITON_INTERPRET=1.

Nothing here is imported by `import gla_ref`.
"""
