"""`async-rl data check`: what data files contain: prompts, lengths, rewards, rows left out.

Invariants: a run reads the files by the same code; every row is counted once; exit code 1
if the settings refuse a row, if the tests of one are useless (rewards/verifier/hollow.py), or if a
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

if TYPE_CHECKING:
    from async_rl.data.drafts import Outcome

# Rows are usually wrong for one reason, which the first ones show.
_NUM_SHOWN = 10
data = typer.Typer(help="Inspect data files before a run.", no_args_is_help=True)


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
    from async_rl.data.prepare import prepare_model
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
    matched = matching_files(config.data.train_files)
    for layout, count in _layouts(matched).most_common():
        typer.echo(f"layout {layout}: {count} rows")
    prompts = [outcome for _, outcome in outcomes if isinstance(outcome, Prompt)]
    try:
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


def _layouts(files: Sequence[str]) -> Counter[str]:
    """Return how many rows have each layout of data/layouts.toml."""
    from async_rl.data.files import open_table
    from async_rl.data.layouts import layout_of, unfolded

    rows = (row for file in files for _, row in open_table(file))
    layouts = [layout_of(unfolded(row)) for row in rows if isinstance(row, dict)]
    return Counter(layout.name for layout in layouts if layout is not None)


async def _tried(
    prompts: Sequence[Prompt], files: Sequence[str], config: RunConfig
) -> tuple[list[str], list[str]]:
    """Return the prompts whose tests judge nothing and the reference solutions that fail, with
    reasons: programs run in the jail.
    """
    from async_rl.rewards.verifier.hollow import problem_with_tests
    from async_rl.rewards.verifier.serving import open_service

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
    # Two settings decide: data.truncation about length, data.bad_rows about the rest.
    over_long = [str(row) for row in rejected if isinstance(row, PromptTooLong)]
    num_cut = sum(length > settings.max_prompt_tokens for length in lengths) - len(over_long)
    if num_cut:
        setting = f"data.truncation={settings.truncation}"
        typer.echo(f"{num_cut} prompts are cut to the limit ({setting})")
    bad = [str(row) for row in rejected if not isinstance(row, PromptTooLong)]
    is_refused = not prompts
    for setting, value, reasons in (
        ("data.truncation", settings.truncation, over_long),
        ("data.bad_rows", settings.bad_rows, bad),
    ):
        fate = "refused" if value == "error" else "left out"
        _show(reasons, f"rows are {fate} ({setting}={value})")
        is_refused |= value == "error" and bool(reasons)
    return is_refused


def _show(reasons: Sequence[str], title: str) -> None:
    if reasons:
        typer.echo(f"{len(reasons)} {title}:")
    for reason in reasons[:_NUM_SHOWN]:
        typer.echo(f"  {reason}")
    if len(reasons) > _NUM_SHOWN:
        typer.echo(f"  and {len(reasons) - _NUM_SHOWN} more")


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
