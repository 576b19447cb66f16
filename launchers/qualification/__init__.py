"""What only a machine with the right devices can show, as one list of measurements with limits."""
