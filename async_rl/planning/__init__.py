"""Calculations before and during a run: topology, size estimates, scaling. No input or output."""
