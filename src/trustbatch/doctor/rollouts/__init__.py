"""The doctor for rollouts that another engine recorded: a file and a model, no engine.

Reading order: recorded, fields, formats, read_file, token_strings, text, alignment, examine,
findings, diagnose, command.
"""
