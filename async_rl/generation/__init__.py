"""Engines that write tokens; see engine.py."""
