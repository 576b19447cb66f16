"""Transfer of new weights from the learner to the generators."""
