"""The learner pool: ranks, pushes of weights, checkpoints."""
