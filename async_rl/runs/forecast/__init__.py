"""Forecasts from the recorded times of a run: its duration with other settings, and the changes
that would make it faster.
"""
