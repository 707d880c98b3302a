"""The parts of :mod:`gla_ref.context_parallel`: tokens of one sequence split over ranks (chapter 25)."""
