"""Checks of settings against each other and against the machine."""
