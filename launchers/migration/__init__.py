"""Configurations of verl and AReaL, translated."""
