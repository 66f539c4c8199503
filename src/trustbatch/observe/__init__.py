"""What a user sees of a run: metrics, progress, status, run folder, reports."""
