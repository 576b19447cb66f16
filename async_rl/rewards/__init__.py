"""Verdicts on programs and scores of responses: the HTTP verifier, its client, and everything that
is compared outside the jail.
"""
