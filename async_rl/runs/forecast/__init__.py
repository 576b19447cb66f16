"""Forecasts from the recorded times of a run: what it would take, and what would make it faster."""
