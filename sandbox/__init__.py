"""The jail: runs a program nobody trusts and brings back only what it emitted. Standard library
only; part of it runs inside.

The host side (`pool`, `cell`) starts *cells*: each a zygote, executed fresh inside namespaces (or
under Landlock alone), which forks one locked-down child per program.  Nothing that says what is
right ever enters a cell: programs emit values, `rewards/` judges them.
"""
