"""Composition of a RunConfig from files and overrides, validated by the schema.

Invariants: every problem is a ConfigError of one or more lines, each naming path, value and remedy;
paths in the result are absolute.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from async_rl.composition import schema
from async_rl.composition.files import QUICKSTART, Source, compose_files, resolved, source_of
from async_rl.composition.hardware import fit_to_machine
from async_rl.composition.overrides import Overrides, read_overrides
from async_rl.composition.problems import problems_of
from async_rl.composition.schema import CONF_DIR, Tree, expand, put, variants
from async_rl.config.base import as_builtins, replace
from async_rl.config.checks.run import check
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine, this_machine
from async_rl.core.os import replace_synced

OPEN = "???"
"""OmegaConf's mark of a value that has to be given: a launch refuses a file with it, hydra would
keep the value below it.
"""


def compose(conf: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose `conf` (a name from conf/, or a path of a yaml file) with `key=value` overrides,
    validate and check it.

    Raises ConfigError for wrong keys, types, ranges and combinations, before anything starts.
    """
    return compose_for(this_machine(), conf, overrides)[0]


def compose_for(
    machine: Machine, conf: str, overrides: Sequence[str] = ()
) -> tuple[RunConfig, str]:
    """As `compose`, for this machine; also the preset of conf/hardware that was given or that fits
    it.
    """
    config, preset = _composed(conf, overrides, machine)
    check(config)
    return config, preset


def compose_unchecked(conf: str, overrides: Sequence[str] = ()) -> RunConfig:
    """As `compose`, without the checks that join several settings."""
    return _composed(conf, overrides, this_machine())[0]


def recompose(written: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The resolved configuration of a run with `key=value` overrides, validated and checked as
    `compose` does.
    """
    source = Source(conf="config.yaml", folder=CONF_DIR, content={})
    config = _validated(as_builtins(written), read_overrides(overrides, []), source)
    check(config)
    return config


def verifier_config(settings: Sequence[str]) -> RunConfig:
    """Compose conf/ with settings of the verifier's sections. Raises ConfigError for others."""
    for setting in settings:
        if not setting.startswith(("sandbox.", "verifiers.", "reward.")):
            raise ConfigError(
                f"{setting}: without a run only sandbox.*, verifiers.* and reward.* have an effect;"
                " leave it out"
            )
    return compose(QUICKSTART, settings)


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration; it is on the disk when this returns.

    It must not exist yet, since it is written once.
    """
    if path.exists():
        raise FileExistsError(path)
    replace_synced(path, to_yaml(config).encode())


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration as every process will read it. Raises ConfigError if settings
    contradict each other.
    """
    # Every road to a file that processes read passes here. The processes themselves validate types
    # and ranges only.
    check(config)
    return msgspec.yaml.encode(as_builtins(config)).decode()


def _composed(conf: str, overrides: Sequence[str], machine: Machine) -> tuple[RunConfig, str]:
    source = source_of(conf)
    given = read_overrides(overrides, [source.folder, CONF_DIR])
    chosen = dict(schema.flatten(source.content)) | given.values
    for path, value in chosen.items():
        if value == OPEN:
            raise ConfigError(
                f"conf={conf}: {path}=??? has no value yet; write it there, give {path}=VALUE, or"
                " name data with async-rl migrate SOURCE --data FILE"
            )
    # The preset of conf/hardware uses the nodes of a cluster. The schema reports an unknown
    # launcher later; it has no nodes.
    launcher = variants()["launcher"].get(str(chosen.get("launcher")), {})
    tree, preset = compose_files(source, given.groups, machine, is_cluster="nodes" in launcher)
    config = _validated(tree, given, source)
    # Settings of the person stay as written; only the other settings are fitted to the
    # machine.
    return fit_to_machine(config, machine, preset, chosen.keys()), preset


def _validated(tree: Tree, given: Overrides, source: Source) -> RunConfig:
    """Return the configuration of the files' tree and the overrides. Raises ConfigError."""
    for path, value in given.values.items():
        put(tree, path, value)
    expand(tree)
    # After `expand`: parameters of a variant may refer to other settings, as in ${num_steps}.
    tree = resolved(tree, source)
    # A run by epochs has as many steps as its prompts need, which are counted below.
    by_epochs = tree.get("num_steps", 0) is None
    if by_epochs:
        # Any valid number: it is replaced below.
        tree["num_steps"] = 1
    # An override wins over the file, so a wrong value of both is the fault of the override.
    in_file = dict(schema.flatten(source.content)).keys() - given.values.keys()
    problems = given.problems + [
        f"conf={source.conf}: {text}" if path in in_file else text
        for path, text in problems_of(tree).items()
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    config = RunConfig.model_validate(tree)
    if not by_epochs:
        return config
    # Counting reads the data files, with pyarrow for some of them.
    from async_rl.data.prompts import steps_of_epochs

    return replace(config, num_steps=steps_of_epochs(config))
