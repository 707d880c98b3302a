"""Pages: one kernel a file, complete and short enough for one sitting (chapters 3, 6, 11 and 12)."""
