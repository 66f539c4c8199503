"""The cluster: rollout engines, graders and trainers in processes of their own, on Ray.

`engine pool.py` samples completions and `remote_scorer.py` grades them, both with a `pool.py` of
actors; `trainers.py` starts several ranks. Weights reach engines as `transfer_method.py` says, by
`publications.py` or `group_publisher.py`. Ray is imported here and nowhere else, and this package only
where a run has [cluster]: see docs/cluster.md.
"""
