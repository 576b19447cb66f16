"""Measurements with limits that require certain devices, in one list."""
