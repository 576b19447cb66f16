"""The environment of every child process: context, peers, entry point."""
