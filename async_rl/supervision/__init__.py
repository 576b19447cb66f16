"""Starting, watching, scaling and ending the processes of a run."""
