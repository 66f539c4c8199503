"""A small language in which objectives fail as on a real model: words, an author, a base model."""
