"""Packed sequences: a forward pass over tokens without padding."""
