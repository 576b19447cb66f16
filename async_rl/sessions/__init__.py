"""Sessions of agents: an endpoint in the forms of other APIs that records what it serves."""
