"""Verdicts on programs and scores of responses: the HTTP verifier, its client, and all comparison
outside the jail.
"""
