r"""Grading answers to math problems; depends on no other package of trustbatch.

Entry point: `grade.grade_math(completion, answer)`, 1 if the final answer of a completion equals
the reference. The stages: `extract` finds the final answer in the completion, `normalize` gives
LaTeX and Unicode one spelling, `forms` splits an answer into its parts (lists, intervals, units),
`formula` parses a part into a tree, and `values` compares two trees.
"""
