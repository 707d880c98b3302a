"""The four kernels of the original GLA implementation, forward only (chapter 12)."""
