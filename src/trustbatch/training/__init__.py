"""The policy update: log-probs, optimizer step, checkpoints."""
