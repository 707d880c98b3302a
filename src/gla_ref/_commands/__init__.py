"""What the command line runs (chapters 4 and 14): `python -m gla_ref` and `python -m gla_ref.pages.gla`."""
