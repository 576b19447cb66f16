"""`async-rl verifier`: the verifier's HTTP server without a run, and `attack`, the attack suite.

Invariants: settings come from conf/ and the arguments; it binds loopback by default; it always
requires a token, and prints one if none is given; the first SIGTERM or Ctrl-C drains, the second
ends immediately.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from async_rl.core.errors import ConfigError, InfrastructureError

if TYPE_CHECKING:
    from async_rl.config.run import RunConfig

_ATTACK, _SERVE = "attack", "serve"


class _ServesByDefault(TyperGroup):
    """The commands of `async-rl verifier`; settings without a command are those of the server."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Name the command that is left out."""
        named = args[:1] in ([_ATTACK], [_SERVE])
        return super().parse_args(ctx, args if named else [_SERVE, *args])


verifier_commands = typer.Typer(
    cls=_ServesByDefault,
    help="Serve verdicts over HTTP without a run; `verifier attack URL` attacks a grader.",
)
_TOKEN_BYTES = 24
_INPUT_BYTES = 4096
_LEVELS = {1: "namespaces", 2: "Landlock and seccomp", 3: "none: programs run unconfined"}
VerifierSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value ...]", help="settings of sandbox and verifiers that differ from conf/"
    ),
]


@verifier_commands.command(_SERVE)
def verifier(
    settings: VerifierSettings = None,
    host: Annotated[str | None, typer.Option(help="address to bind; default: loopback")] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port to bind; 0 = a free one, which is printed")
    ] = 0,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="ASYNC_RL_TOKEN",
            help="token that clients must send; default: a new one, which is printed",
        ),
    ] = None,
    cells: Annotated[
        int | None,
        typer.Option(min=1, help="programs that run in parallel; default: verifiers.cells"),
    ] = None,
    allow_unsafe: Annotated[
        bool,
        typer.Option(
            "--allow-unsafe", help="run even where no jail works, if every program is trusted"
        ),
    ] = False,
    end_with_input: Annotated[
        bool,
        typer.Option(
            "--end-with-input",
            help="end when standard input is closed, for a program that starts a verifier",
        ),
    ] = False,
) -> None:
    """Serve verdicts over HTTP until stopped, without a run.

    Examples: async-rl verifier; async-rl verifier --port 8080 --cells 4 sandbox.timeout_s=5
    """
    overrides = list(settings or [])
    if cells is not None:
        overrides.append(f"verifiers.cells={cells}")
    if allow_unsafe:
        overrides.append("sandbox.allow_unsafe=true")
    # The imports of a composer take half a second, which `async-rl verifier --help` need not wait.
    from async_rl.composition.verifier import verifier_config
    from async_rl.wire.addresses import host_for_people

    config = verifier_config(overrides)

    if token == "":
        raise ConfigError("--token is empty; give one, or omit the option to get a new one")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    address = host or host_for_people(config.network)
    asyncio.run(_serve(config, address, port, token, end_with_input=end_with_input))


@verifier_commands.command(_ATTACK)
def attack(
    url: Annotated[str, typer.Argument(help="address of the grader, without the path of a form")],
    form: Annotated[
        str, typer.Option(help="how it is asked: verify, functioncalls (AReaL) or run_code")
    ] = "verify",
    token: Annotated[
        str, typer.Option(envvar="ASYNC_RL_TOKEN", help="bearer token; default: send none")
    ] = "",
) -> None:
    """Run the public attack suite against a grader, and print a table by family of attacks.

    Examples: async-rl verifier attack http://127.0.0.1:8100 --token SECRET; async-rl verifier
    attack http://127.0.0.1:8080 --form run_code
    """
    from async_rl.rewards.verifier.attacks import FORMS, Outcome, run

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


async def _serve(
    config: RunConfig, host: str, port: int, token: str | None, *, end_with_input: bool
) -> None:
    from async_rl.observability.activity import Activity
    from async_rl.rewards.verifier.serving import listen, open_service, serve

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        # Without our handler, the next signal ends the process.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if end_with_input:

        def read_input() -> None:
            if not os.read(sys.stdin.fileno(), _INPUT_BYTES):
                loop.remove_reader(sys.stdin)
                stop()

        loop.add_reader(sys.stdin, read_input)
    secret = token or secrets.token_urlsafe(_TOKEN_BYTES)
    with listen(host, port) as listener:
        async with open_service(
            config.verifiers, config.sandbox, Activity(), config.timeouts, config.reward
        ) as service:

            async def ready(url: str) -> None:
                level = service.cells.level
                jail = f"jail level {level}: {_LEVELS[level]}; {service.num_cells} cells"
                typer.echo(f"verifier at {url} ({jail})")
                if token is None:
                    typer.echo(f"token {secret}")
                for reason in service.cells.reasons:
                    typer.echo(f"a stronger jail was not possible: {reason}")

            await serve(
                service,
                listener,
                token=secret,
                ready=ready,
                stopping=stopping,
                log=logging.getLogger("async_rl"),
            )
    typer.echo("verifier ended: all admitted requests are answered")
