"""Example environments: tasks that reply to a completion, after which the policy continues.

`trustbatch.tasks.base.Environment` is the interface; each example is in `trustbatch.tasks.TASKS`.
"""
