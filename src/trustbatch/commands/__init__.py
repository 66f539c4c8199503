"""The commands of `trustbatch`: one module for each group, with its arguments and what it does.

`add_NAME` adds the arguments; a command is a function of the parsed options that returns the exit
status. Each imports what it needs when it runs: `trustbatch --help` answers at once.
"""
