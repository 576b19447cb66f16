"""`async-rl data check`: what data files contain: prompts, lengths, rewards, rows left out.

Invariants: the code that reads the files is that of a run; every row is counted once; exit code 1
if the settings refuse a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from async_rl.config.checks.reward import reward_problems
from async_rl.config.checks.run import raise_if_any
from async_rl.config.reward_terms import TESTS, functions_of, terms_of
from async_rl.config.rewards import RewardConfig
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.types import AnswerTest, CodeTest
from async_rl.launchers.commands.options import split_conf

if TYPE_CHECKING:
    from async_rl.data.files import Rejected
    from async_rl.data.prompts import Examined

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
    """Show what data files contain, how long the prompts are, which reward each row has, and which
    rows are left out and why.

    Examples: async-rl data check problems.jsonl model.path=/models/mine; async-rl data check
    my_task/train.jsonl conf=my_task/conf.yaml
    """
    from async_rl.data.prepare import prepare_model
    from async_rl.data.prompts import examine
    from async_rl.data.tokenizer import load_tokenizer
    from async_rl.launchers.configuration.compose import compose_unchecked, names
    from async_rl.rewards.functions import check_functions

    files = [argument for argument in arguments if "=" not in argument]
    conf, overrides = split_conf([argument for argument in arguments if "=" in argument])
    if not files:
        raise ConfigError("no file is given; name at least one .jsonl, .json or .parquet file")
    train_files = f"data.train_files={_listed(files)}"
    config = compose_unchecked(conf or names()[0], [train_files, *overrides])
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set, but prompts are measured in its tokens; set model.path to a"
            " model's directory or hub name"
        )
    raise_if_any(reward_problems(config))
    raise_if_any(check_functions(functions_of(config.reward), config.reward))
    path = prepare_model(config, lambda _, text: typer.echo(text, err=True))
    tokenizer = load_tokenizer(config, path)
    if _report(examine(config.data.train_files, config, tokenizer), config):
        raise typer.Exit(1)


def _listed(files: list[str]) -> str:
    """Return the files as one override, quoted so that no character of a path has a meaning."""
    return "[" + ",".join("'" + file.replace("'", r"\'") + "'" for file in files) + "]"


def _report(examined: Examined, config: RunConfig) -> bool:
    """Print the report and return whether a run with these settings would refuse the files."""
    settings = config.data
    typer.echo(
        f"{len(examined.prompts) + len(examined.rejected)} rows, {len(examined.prompts)} prompts"
    )
    if examined.lengths:
        ordered = sorted(examined.lengths)
        median = ordered[len(ordered) // 2]
        late = ordered[int(0.95 * len(ordered))]
        spread = f"shortest {ordered[0]}, median {median}, 95% {late}, longest {ordered[-1]}"
        typer.echo(f"prompt tokens: {spread} (limit {settings.max_prompt_tokens})")
    scorers = Counter(_scorers(examined, config.reward))
    for (source, scorer), count in scorers.most_common():
        typer.echo(f"data_source {source}: {count} rows, reward by {scorer}")
    if examined.num_cut:
        setting = f"data.truncation={settings.truncation}"
        typer.echo(f"{examined.num_cut} prompts are cut to the limit ({setting})")
    over_long = [rejected for rejected in examined.rejected if rejected.is_over_long]
    bad = [rejected for rejected in examined.rejected if not rejected.is_over_long]
    has_refused = [
        _show_rejected(over_long, "data.truncation", settings.truncation),
        _show_rejected(bad, "data.bad_rows", settings.bad_rows),
    ]
    return any(has_refused) or not examined.prompts


def _show_rejected(rejected: Sequence[Rejected], setting: str, value: str) -> bool:
    """Print the rows that a setting leaves out and return whether a run would refuse them."""
    if not rejected:
        return False
    is_refused = value == "error"
    typer.echo(
        f"{len(rejected)} rows are {'refused' if is_refused else 'left out'} ({setting}={value}):"
    )
    for row in rejected[:_NUM_SHOWN]:
        typer.echo(f"  {row.reason}")
    if len(rejected) > _NUM_SHOWN:
        typer.echo(f"  and {len(rejected) - _NUM_SHOWN} more")
    return is_refused


def _scorers(examined: Examined, reward: RewardConfig) -> list[tuple[str, str]]:
    """Return the data source of each prompt and the terms of its reward with their weights."""
    scorers = []
    for prompt in examined.prompts:
        tests = ", ".join(sorted({_scorer(test) for test in prompt.problem.tests})) or "no tests"
        terms = []
        for term in terms_of(reward, prompt.data_source):
            name = tests if term.function == TESTS else term.function
            terms.append(name if term.weight == 1 else f"{term.weight:g} x {name}")
        scorers.append((prompt.data_source, " + ".join(terms)))
    return scorers


def _scorer(test: CodeTest) -> str:
    if isinstance(test, AnswerTest):
        return f"{test.rule} answer"
    return f"{test.__struct_config__.tag} tests"
