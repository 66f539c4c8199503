"""Transports of weights from trainer to engines: chunks, disk and process groups; no Ray."""
