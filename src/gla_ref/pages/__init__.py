"""Pages: one kernel a file, complete and short enough for one sitting (chapters 4, 7, 14 to 16, 20, 22 and 23).

Each page runs by itself: `python -m gla_ref.pages.gla` checks its kernel against the recurrence and, on a GPU, times
it.
"""
