"""A run as a repository of a model hub: its files, its model card, and the upload."""
