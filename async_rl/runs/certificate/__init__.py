"""The certificate of a run: what can be said about its data and weights, each with its evidence."""
