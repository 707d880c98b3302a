"""Pages: one kernel a file, complete and short enough for one sitting (chapters 4, 7 and 14 to 16)."""
