"""The rules of an AReaL configuration that depend on more than one key; see areal.yaml."""

from async_rl.launchers.migration.rules import Fate, Given, refused, same


def sequence(given: Given) -> Fate:
    """The engine's length limit, which must not cut responses."""
    needed = given.source["dataset.max_prompt_len"] + given.source["ppo.gen.max_new_tokens"]
    # The engine would cut responses that data.max_response_tokens allows.
    if given.value < needed:
        return refused(f"below prompt and response of {needed} tokens: leave it out")
    return same(f"the engine receives what prompt and response need: {needed} tokens")
