"""What people see of a run: the metrics writer, rates, the terminal, status and TensorBoard."""
