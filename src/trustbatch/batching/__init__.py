"""From scored rollouts to the micro-batches of forward passes."""
