"""Asynchronous reinforcement learning of language models."""
