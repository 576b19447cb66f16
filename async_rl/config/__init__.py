"""The schema of the configuration: one file per section."""
