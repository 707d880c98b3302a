"""The command line's programs (chapters 4 and 14): `python -m gla_ref` and `python -m gla_ref.pages.gla`."""
