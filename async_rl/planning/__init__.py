"""Calculations before and during a run: topology and size estimates.

The only file that they read is a model's config.json.
"""
