"""The main loop: the only code that knows the order of the stages.

`train` is the loop, `sources` and `producer` are where its batches come from, `generate` makes one
batch, and `recorder` keeps what a step leaves behind. `session` holds the parts that they share.
"""
