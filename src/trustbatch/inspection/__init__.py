"""The microscope: one batch of a run under every objective; nothing is trained or written.

`steps` finds what a run folder still has, `reopen` brings back the policy and the batch of a step,
`logged` reads tokens that were written down, `token_summary` and `gradients` measure, and `examine`
puts it together. `terminal` and `page` show the result.
"""
