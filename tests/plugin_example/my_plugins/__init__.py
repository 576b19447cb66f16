"""Plug-ins for async_rl: a reward, a rollout, an engine and a data source."""
