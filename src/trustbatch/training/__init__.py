"""The policy update: trainer, log-probs, ratio metrics, canary, optimizer, sharding."""
