"""What every child process has: its context, its peers, its entry point."""
