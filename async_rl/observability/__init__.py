"""The reports of a process: its activity, its log, and the catalogue of all metrics."""
