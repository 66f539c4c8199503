"""The policy: model and tokenizer, loading, LoRA, GGUF, packing, and tiny models."""
