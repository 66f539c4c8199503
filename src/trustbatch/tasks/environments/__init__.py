"""Tasks that answer: an environment replies to a completion, and the policy goes on.

`base.py` says what one is; the other files are examples, each in `trustbatch.tasks.TASKS`.
"""
