"""The web view of runs: a local, read-only web application on the files of a run."""
