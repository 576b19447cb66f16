"""What a process tells of itself: its activity, its log, and the catalogue of every number."""
