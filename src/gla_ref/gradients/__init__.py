"""Closed forms of the gradients of GLA (chapter 15) and of both delta rules (chapter 20), without KDA."""
