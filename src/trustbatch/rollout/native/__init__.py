"""Parts of the native engine, in the order of the data's way: linear, cache, decoder, batch."""
