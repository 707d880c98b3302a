"""The book's machinery: pictures to move, judges of exercises, tables, costs, records (docs/chapters.md)."""
