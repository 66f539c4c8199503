"""The native engine; its layers from the bottom: linear, cache, decoder, batch, engine."""
