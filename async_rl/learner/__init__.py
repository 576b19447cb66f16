"""The learner: models, the update, checkpoints. `trainer.Trainer` is its one entry."""
