"""Helpers without a topic of their own: ranks, terminal, files, processes."""
