"""`async-rl data check`: what data files contain: prompts, lengths, rewards, rows left out.

Invariants: a run reads the files by the same code; every row is counted once; exit code 1
if the settings refuse a row, if the tests of one are useless (rewards/verifier/judging.py), or if a
reward function gives the first row of a data source no score.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from async_rl.config.base import replace
from async_rl.config.checks.run import problems, raise_if_any
from async_rl.config.rewards import TESTS, PluginTerm, RewardConfig
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, DataError, PromptTooLong, RewardError
from async_rl.core.types import AnswerTest, CodeTest, Prompt
from async_rl.launchers.commands.options import show_preparation, split_conf
from async_rl.launchers.commands.verifier import for_each, wrong_references
from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.runs.certificate.statements import listed

if TYPE_CHECKING:
    from async_rl.data.drafts import Outcome

data = typer.Typer(no_args_is_help=True)


@data.callback()
def _group() -> None:
    """Inspect data files before a run."""


@data.command()
def check(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE... [conf=NAME] [key=value ...]",
            help="files, globs or URLs, and the settings to read them with",
        ),
    ],
) -> None:
    """Show what data files contain, how long the prompts are, which reward each row has, which rows
    are left out and why, which tests any program passes or none can, and which reward functions
    fail.

    Examples: async-rl data check problems.jsonl model.path=/models/mine; async-rl data check
    my_task/train.jsonl conf=my_task/conf.yaml
    """
    from async_rl.composition.compose import compose_unchecked
    from async_rl.composition.files import QUICKSTART
    from async_rl.composition.overrides import as_words
    from async_rl.data.files import matching_files
    from async_rl.data.model_files import prepare_model
    from async_rl.data.prompts import examined
    from async_rl.data.tokenizer import load_tokenizer
    from async_rl.rewards.functions import check_functions

    files = [argument for argument in arguments if "=" not in argument]
    conf, overrides = split_conf([argument for argument in arguments if "=" in argument])
    if not files:
        raise ConfigError("no file is given; name at least one .jsonl, .json or .parquet file")
    words = [*as_words({"data.train_files": files}), *overrides]
    config = compose_unchecked(conf or QUICKSTART, words)
    # The tokenizer of the embedded model knows its own task only.
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set, but prompts are measured in its tokens; set model.path to a"
            " model's directory or hub name"
        )
    raise_if_any(text for text in problems(config) if text.startswith("reward."))
    raise_if_any(check_functions(config.reward))
    path = prepare_model(config, show_preparation)
    tokenizer = load_tokenizer(config, path)
    outcomes = list(examined(config.data.train_files, config, tokenizer))
    is_refused = _report(outcomes, config)
    prompts = [outcome for _, outcome in outcomes if isinstance(outcome, Prompt)]
    try:
        matched = matching_files(config.data.train_files)
        useless, wrong = asyncio.run(_tried(prompts, matched, config))
    # No jail works here: the rows themselves may still be right.
    except ConfigError as error:
        useless = []
        wrong = []
        typer.echo(f"the tests were not tried: {error}")
    _show(useless, "rows have useless tests")
    _show(wrong, "reference solutions fail the tests of their rows")
    unscored = asyncio.run(_unscored(prompts, config))
    _show(unscored, "rows have no score when the response is the prompt itself")
    if is_refused or useless or wrong or unscored:
        raise typer.Exit(1)


async def _tried(
    prompts: Sequence[Prompt], files: Sequence[str], config: RunConfig
) -> tuple[list[str], list[str]]:
    """Return the prompts whose tests judge nothing and the reference solutions that fail, with
    reasons: programs run in the jail.
    """
    from async_rl.rewards.verifier.judging import problem_with_tests
    from async_rl.rewards.verifier.service import open_service

    programs = [prompt for prompt in prompts if not prompt.problem.wants_words]
    if not programs:
        return [], []
    # Some rows may take their whole time limit, so more than one runs at a time.
    verifiers = replace(config.verifiers, cells=len(os.sched_getaffinity(0)))
    verdicts: dict[str, str] = {}
    async with open_service(replace(config, verifiers=verifiers)) as service:

        async def examine(prompt: Prompt) -> None:
            verdicts[prompt.prompt_id] = await problem_with_tests(service.judge, prompt.problem)

        await for_each(programs, examine, verifiers.cells)
        wrong = await wrong_references(files, config, service)
    useless = [f"{name}: {reason}" for name, reason in sorted(verdicts.items()) if reason]
    return useless, wrong


async def _unscored(prompts: Sequence[Prompt], config: RunConfig) -> list[str]:
    """Return why functions of the user's give the first row of a data source no score."""
    from async_rl.rewards.verifier.reward_process import RewardProcess

    terms = config.reward.terms.items()
    # A reward model may be large, and the server of a remote term is asked by samples only.
    own = {name: term for name, term in terms if isinstance(term, PluginTerm)}
    firsts = {prompt.data_source: prompt for prompt in reversed(prompts)}
    rewards = RewardProcess(replace(config.reward, terms=own), timeouts=config.timeouts)
    problems: list[str] = []
    try:
        for source, prompt in firsts.items():
            names = {term.function for term in config.reward.terms_of(source)} & {*own}
            try:
                await rewards.score(sorted(names), _sample(prompt, config))
            except* RewardError as group:
                problems += [f"{prompt.prompt_id}: {error}" for error in group.exceptions]
    finally:
        await rewards.close()
    return problems


def _sample(prompt: Prompt, config: RunConfig) -> RewardSample:
    """Return the prompt as its own response: a text that no function knows."""
    tokens = prompt.token_ids.tolist()
    return RewardSample(
        prompt_id=prompt.prompt_id,
        prompt=prompt.text,
        response=prompt.text,
        transcript=prompt.text,
        token_ids=tokens,
        is_written=[True] * len(tokens),
        data_source=prompt.data_source,
        row=msgspec.json.decode(prompt.problem.row or "{}"),
        tests=prompt.problem.tests,
        setup=prompt.problem.setup,
        is_truncated=False,
        max_tokens=config.data.max_response_tokens,
        language=prompt.problem.language,
    )


def _report(outcomes: Sequence[Outcome], config: RunConfig) -> bool:
    """Print the report and return whether a run with these settings would refuse the files."""
    settings = config.data
    prompts = [outcome for _, outcome in outcomes if isinstance(outcome, Prompt)]
    rejected = [outcome for _, outcome in outcomes if isinstance(outcome, DataError)]
    typer.echo(f"{len(outcomes)} rows, {len(prompts)} prompts")
    if lengths := sorted(num_tokens for num_tokens, _ in outcomes if num_tokens):
        median = lengths[len(lengths) // 2]
        late = lengths[int(0.95 * len(lengths))]
        spread = f"shortest {lengths[0]}, median {median}, 95% {late}, longest {lengths[-1]}"
        typer.echo(f"prompt tokens: {spread} (limit {settings.max_prompt_tokens})")
    scorers = Counter(_scorers(prompt, config.reward) for prompt in prompts)
    for (source, scorer), count in scorers.most_common():
        typer.echo(f"data_source {source}: {count} rows, reward by {scorer}")
    is_refused = not prompts
    # Two settings decide: one about length, one about the rest.
    for setting, value, is_length in (
        ("data.truncation", settings.truncation, True),
        ("data.bad_rows", settings.bad_rows, False),
    ):
        reasons = [str(row) for row in rejected if isinstance(row, PromptTooLong) is is_length]
        fate = "refused" if value == "error" else "left out"
        _show(reasons, f"rows are {fate} ({setting}={value})")
        is_refused |= value == "error" and bool(reasons)
    return is_refused


def _show(reasons: Sequence[str], title: str) -> None:
    if reasons:
        typer.echo(f"{len(reasons)} {title}:")
    for reason in listed(reasons):
        typer.echo(f"  {reason}")


def _scorers(prompt: Prompt, reward: RewardConfig) -> tuple[str, str]:
    """Return the data source of a prompt and the terms of its reward with their weights."""
    tests = ", ".join(sorted({_scorer(test) for test in prompt.problem.tests})) or "no tests"
    terms = []
    for term in reward.terms_of(prompt.data_source):
        name = tests if term.function == TESTS else term.function
        terms.append(name if term.weight == 1 else f"{term.weight:g} x {name}")
    return prompt.data_source, " + ".join(terms)


def _scorer(test: CodeTest) -> str:
    if isinstance(test, AnswerTest):
        return f"{test.rule} answer"
    return f"{test.__struct_config__.tag} tests"
