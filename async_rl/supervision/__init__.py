"""Starts, watches, scales and ends the processes of a run."""
