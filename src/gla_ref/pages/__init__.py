"""Pages: one kernel a file, complete and short enough for one sitting (chapters 4, 7, 13, 15, 16, 20, 22, 23 and 24).

A page imports nothing but torch and Triton. As a program, `python -m gla_ref.pages.gla`, it has its kernel checked
against the recurrence and, on a GPU, timed.
"""
