"""The doctor: is this stack on-policy, and if not, what is it that differs?

Reading order: samples, laws, recompute, search, forwards, probe, examine, verdict, show.
"""
