"""How new weights travel to an engine."""
