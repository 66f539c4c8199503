"""Checkpoints: written in the background of the training, restored bit for bit."""
