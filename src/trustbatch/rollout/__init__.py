"""Generation: from prompts to completions, with the true probability of every token."""
