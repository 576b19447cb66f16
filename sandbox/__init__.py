"""The jail: runs an untrusted program and returns only its output.

It uses the standard library only, because part of it runs inside. The host side (`cells`,
`cell`) starts *cells*: each is a zygote, executed fresh inside namespaces (or under Landlock
alone), which forks one locked-down child per program. An expected output never enters a cell:
programs emit values, `rewards/` judges them.
"""
