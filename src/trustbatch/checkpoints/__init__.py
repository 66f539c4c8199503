"""Checkpoints: written beside the training, read back exactly."""
