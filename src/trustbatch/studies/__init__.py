"""Studies: comparisons of objectives, each a command; see docs/studies.md."""
