"""The SQLite store of a run and its readers."""
