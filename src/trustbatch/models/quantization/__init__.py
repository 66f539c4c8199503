"""Quantized frozen weights: their formats, layers, GPU kernels, and published checkpoints."""
