"""Search, measure, judge: knows no SQL and no terminal."""
