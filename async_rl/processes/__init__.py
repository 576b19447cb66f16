"""The processes of a run: supervisor, buffer, generator, verifier, learner. Start reading here."""
