"""From scored rollouts to what one forward pass takes."""
