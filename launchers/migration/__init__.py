"""Translation of configurations of verl and AReaL."""
