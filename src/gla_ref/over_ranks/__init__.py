"""What :mod:`gla_ref.context_parallel` is made of: tokens of one sequence split over ranks (chapter 23)."""
