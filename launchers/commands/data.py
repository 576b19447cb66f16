"""`async-rl data check`: what data files hold, before a run does: prompts, their lengths, rewards,
and the rows that would be left out.

Invariants: the files are read by the code by which a run reads them; every row is counted once;
exit code 1 if the settings refuse a row.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from async_rl.config.reward_terms import TESTS, functions_of, terms_of
from async_rl.core.errors import ConfigError
from async_rl.core.types import AnswerTest, CodeTest

if TYPE_CHECKING:
    from async_rl.config.rewards import RewardConfig
    from async_rl.config.run import RunConfig
    from async_rl.data.prompts import Examined

_NUM_SHOWN = 10
data = typer.Typer(help="Look at data files before a run does.", no_args_is_help=True)


@data.callback()
def _group() -> None:
    """Look at data files before a run does."""


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
    """Say what data files hold, how long the prompts are, which reward each row gets, and what
    would be left out and why.

    Examples: async-rl data check problems.jsonl model.path=/models/mine; async-rl data check
    my_task/train.jsonl conf=my_task/conf.yaml
    """
    from async_rl.data.prompts import examine
    from async_rl.data.tokenizer import load_tokenizer
    from async_rl.launchers.configuration.compose import compose_unchecked, names

    files = [argument for argument in arguments if "=" not in argument]
    conf = next(
        (argument.removeprefix("conf=") for argument in arguments if argument.startswith("conf=")),
        names()[0],
    )
    overrides = [
        argument for argument in arguments if "=" in argument and not argument.startswith("conf=")
    ]
    if not files:
        raise ConfigError("no file is given; name at least one .jsonl, .json or .parquet file")
    config = compose_unchecked(conf, [f"data.train_files={_listed(files)}", *overrides])
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set; prompts are measured in its tokens: set model.path to a model's"
            " directory or hub name"
        )
    from async_rl.config.checks.reward import reward_problems
    from async_rl.config.checks.run import raise_if_any
    from async_rl.data.prepare import prepare_model
    from async_rl.rewards.functions import check_functions

    raise_if_any(reward_problems(config))
    raise_if_any(check_functions(functions_of(config.reward), config.reward))
    path = prepare_model(config, lambda _, text: typer.echo(text, err=True))
    tokenizer = load_tokenizer(config, path)
    if _report(examine(config.data.train_files, config, tokenizer), config):
        raise typer.Exit(1)


def _listed(files: list[str]) -> str:
    """The files as one override: quoted, so that no sign of a path means anything."""
    return "[" + ",".join("'" + file.replace("'", r"\'") + "'" for file in files) + "]"


def _report(examined: Examined, config: RunConfig) -> bool:
    """Print the report; whether a run with these settings would refuse the files."""
    settings = config.data
    num_rows = len(examined.prompts) + len(examined.rejected)
    over_long = [rejected for rejected in examined.rejected if rejected.is_over_long]
    bad = [rejected for rejected in examined.rejected if not rejected.is_over_long]
    typer.echo(f"{num_rows} rows, {len(examined.prompts)} prompts")
    if examined.lengths:
        ordered = sorted(examined.lengths)
        middle, late, last = (
            ordered[len(ordered) // 2],
            ordered[int(0.95 * len(ordered))],
            ordered[-1],
        )
        spread = f"shortest {ordered[0]}, median {middle}, 95% {late}, longest {last}"
        typer.echo(f"prompt tokens: {spread} (limit {settings.max_prompt_tokens})")
    for (source, kinds), count in Counter(_rewarded(examined, config.reward)).most_common():
        typer.echo(f"data_source {source}: {count} rows, reward by {kinds}")
    if examined.num_cut:
        typer.echo(
            f"{examined.num_cut} prompts are cut to the limit"
            f" (data.truncation={settings.truncation})"
        )
    for rejected, setting, value in (
        (over_long, "truncation", settings.truncation),
        (bad, "bad_rows", settings.bad_rows),
    ):
        if rejected:
            fate = "refused" if value == "error" else "left out"
            typer.echo(f"{len(rejected)} rows are {fate} (data.{setting}={value}):")
            for item in rejected[:_NUM_SHOWN]:
                typer.echo(f"  {item.reason}")
            if len(rejected) > _NUM_SHOWN:
                typer.echo(f"  and {len(rejected) - _NUM_SHOWN} more")
    return bool(
        (over_long and settings.truncation == "error")
        or (bad and settings.bad_rows == "error")
        or not examined.prompts
    )


def _rewarded(examined: Examined, reward: RewardConfig) -> list[tuple[str, str]]:
    """Data source and what scores it, of each prompt: the terms of its reward, each with its
    weight.
    """
    found = []
    for prompt in examined.prompts:
        own = ", ".join(sorted({_scorer(test) for test in prompt.problem.tests})) or "no tests"
        terms = [
            (own if term.function == TESTS else term.function, term.weight)
            for term in terms_of(reward, prompt.data_source)
        ]
        found.append(
            (
                prompt.data_source,
                " + ".join(
                    what if weight == 1 else f"{weight:g} x {what}" for what, weight in terms
                ),
            )
        )
    return found


def _scorer(test: CodeTest) -> str:
    return (
        f"{test.rule} answer"
        if isinstance(test, AnswerTest)
        else f"{test.__struct_config__.tag} tests"
    )
