"""Examples of user code: a rollout of two turns."""
