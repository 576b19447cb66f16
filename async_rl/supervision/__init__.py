"""Starts, watches, scales and stops the processes of a run."""
