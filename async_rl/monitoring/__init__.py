"""The display of a run: metrics writer, rates, terminal, status and TensorBoard."""
