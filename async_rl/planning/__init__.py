"""Calculations before and during a run: topology, size estimates, scaling.

The only file that they read is a model's config.json.
"""
