"""Programs behind `python -m gla_ref` ("Check your kernel") and `python -m gla_ref.pages.gla` (chapter 4)."""
