"""The Python interface: what `import async_rl` offers, and what the command line shares with it."""
