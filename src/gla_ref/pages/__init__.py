"""Pages: one kernel a file, complete and short enough for one sitting (chapters 3, 7, 13 and 15)."""
