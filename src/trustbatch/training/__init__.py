"""The policy update: log-probs, optimiser step, checkpoints."""
