"""Sequences laid end to end: what a model computes is tokens, never padding."""
