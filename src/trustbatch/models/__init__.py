"""The policy and what it is made from: loading, LoRA, GGUF, packing, tiny models."""
