"""Attacks a grader with the public attack suite: `python -m benchmarks.attacks URL`."""

from __future__ import annotations

from typing import Annotated

import typer

from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.launchers import cli
from benchmarks.attacks.suite import FORMS, Outcome, run

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def attack(
    url: Annotated[str, typer.Argument(help="address of the grader, without the path of a form")],
    form: Annotated[
        str, typer.Option(help="form of the requests: verify, functioncalls (AReaL) or run_code")
    ] = "verify",
    token: Annotated[
        str, typer.Option(envvar="ASYNC_RL_TOKEN", help="bearer token; default: send none")
    ] = "",
) -> None:
    """Run the public attack suite against a grader, and print a table by family of attacks.

    Examples: python -m benchmarks.attacks http://127.0.0.1:8100 --token SECRET; python -m
    benchmarks.attacks http://127.0.0.1:8080 --form run_code
    """

    if form not in FORMS:
        raise ConfigError(f"--form {form} is unknown; use one of {', '.join(FORMS)}")
    trials = list(run(url, form, token))
    if all(trial.outcome is Outcome.CRASHED for trial in trials):
        reason = trials[0].reason if trials else "it refuses every form of test"
        raise InfrastructureError(
            f"{url} gave no verdict: {reason}; give the address of a grader that speaks --form"
            f" {form}"
        )
    typer.echo("family               programs    held  forged  crashed")
    for family in dict.fromkeys(trial.attack.family for trial in trials):
        outcomes = [trial.outcome for trial in trials if trial.attack.family == family]
        held, forged, crashed = map(outcomes.count, Outcome)
        typer.echo(f"{family:20} {len(outcomes):8} {held:7} {forged:7} {crashed:8}")
    lost = [trial for trial in trials if trial.outcome is not Outcome.HELD]
    for trial in lost:
        name = f"{trial.attack.family}: {trial.attack.name} ({trial.kind})"
        typer.echo(f"{trial.outcome}: {name} {trial.reason}".rstrip())
    if lost:
        raise typer.Exit(1)


if __name__ == "__main__":
    cli.run(app)
