"""Grading answers to mathematical problems, on its own."""
