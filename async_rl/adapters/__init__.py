"""Rewards of other trainers from a running verifier (`async-rl verifier`): one file per trainer,
which imports nothing of it.

Each reads the server's address from ASYNC_RL_VERIFIER_URL (`http://host:port/token/SECRET`) unless
it is given. Invariant: a program that could not be judged is never scored; each file says what the
trainer receives instead.
"""
