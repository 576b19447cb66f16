"""Worked examples of what users bring: a rollout of two turns."""
