"""What a person sees: metrics, progress, reports."""
