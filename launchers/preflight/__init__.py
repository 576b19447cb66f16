"""Checks before a run starts, and the plan that `--dry-run` prints."""
