"""Helpers below all other packages: ranks, terminal output, files, processes, CUDA memory."""
