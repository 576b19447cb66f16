"""What is asked: the embedded task and its model, data files, prompts and their order."""
