"""trustbatch: RL on language models whose trust in a batch is measured from the batch."""
