"""The prompts: the embedded task and its model, data files, prompts and their order."""
