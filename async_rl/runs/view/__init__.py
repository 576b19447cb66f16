"""The web view of runs: a local, read-only web application on what a run leaves on disk."""
