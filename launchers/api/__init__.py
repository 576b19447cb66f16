"""The Python interface: the names of `import async_rl`, and code that the command line shares."""
