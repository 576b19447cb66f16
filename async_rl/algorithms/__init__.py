"""The mathematics of the objective: pure functions of tensors, each with its formula and source."""
