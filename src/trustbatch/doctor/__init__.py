"""The doctor: is this stack on-policy, and if not, what differs?

Reading order: distributions, examined_tokens, recompute, search, arithmetic, sampling, probe,
examine, findings, verdict.
"""
