"""Generation beside training, in processes that Ray places; the only package that imports Ray.

`engine_pool.py` samples completions and `remote_scorer.py` grades them, both with an `ActorPool`;
`trainers.py` starts several ranks, and `publishers.py` chooses how weights reach the engines. It is
only imported for runs with [cluster]: see docs/cluster.md.
"""
