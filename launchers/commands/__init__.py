"""One file per command of `async-rl`."""
