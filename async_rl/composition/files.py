"""The files of a configuration: those of conf/ and the user's own, composed by hydra.

Invariants: hydra's job features (working directory, logging, output folders) are never used; an
error of yaml, OmegaConf or hydra, whose messages name their own classes and search paths, becomes a
ConfigError with the file.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from async_rl.composition import hardware
from async_rl.composition.problems import hint
from async_rl.composition.schema import CONF_DIR, Tree
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.core.machine import Machine

USER_CONFIG = "user_file"
"""Name under which a user's own file is registered with hydra; conf/ has no such file."""
NOT_RUNS = ("base", "variants")
"""Files of conf/ that are parts of every configuration."""
QUICKSTART = "ppo_code"
"""The conf of commands that name none. One with an agent would accept rows without tests."""


def names() -> list[str]:
    """The names that `conf=` knows."""
    return sorted(path.stem for path in CONF_DIR.glob("*.yaml") if path.stem not in NOT_RUNS)


@frozen
class Source:
    """The configuration that a person names. folder: of the person's own file, or conf/; content:
    the settings in that file alone, empty for a name from conf/.
    """

    conf: str
    folder: Path
    content: Tree


def source_of(conf: str) -> Source:
    """Find the configuration of this name, or read this yaml file, which is made known to hydra.
    Raises ConfigError.

    A file goes through hydra's store because hydra takes a primary file from one directory only,
    and ours is conf/.
    """
    path = Path(conf).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        # Before hydra, whose message names its search path.
        if conf not in names():
            raise ConfigError(
                f"conf={conf}: neither a name from conf/ nor a yaml file;"
                f" {hint(conf, among=names())}; a file of another trainer needs async-rl migrate"
            )
        return Source(conf=conf, folder=CONF_DIR, content={})
    folder = path.resolve().parent
    OmegaConf.register_new_resolver("beside", lambda name: str(folder / name), replace=True)
    try:
        node = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"conf={conf}: cannot be read as yaml text in UTF-8 ({_one_line(error)}); correct the"
            " path, or look for a tab, a name that is set twice, a bracket or a quote that is not"
            " closed, and for a missing colon, there and in the lines before"
        ) from error
    defaults = node.get("defaults") if isinstance(node, DictConfig) else None
    if not isinstance(defaults, ListConfig):
        raise ConfigError(
            f"conf={conf}: must start with the configuration that it builds on, as in 'defaults:"
            " [ppo_code, _self_]'; a file of another trainer needs async-rl migrate"
        )
    if "_self_" not in defaults:
        # The file's own settings win over those it builds on. Hydra does the same, with a warning.
        defaults.append("_self_")
    ConfigStore.instance().store(name=USER_CONFIG, node=node)
    return Source(conf=conf, folder=folder, content=_tree_of(node, resolve=False))


def compose_files(
    source: Source, groups: Sequence[str], machine: Machine, *, is_cluster: bool
) -> tuple[Tree, str]:
    """Return the tree that hydra composes from files, with `${...}` as written, and the preset of
    conf/hardware. Raises ConfigError.

    is_cluster: the launcher divides the nodes of a cluster.
    """
    OmegaConf.register_new_resolver("with_files", with_files, replace=True)
    fitting = hardware.preset_for(machine, is_cluster=is_cluster)
    for name, function in hardware.resolvers(machine, fitting).items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    with readable_errors(source, groups):
        if source.content:
            words = (*groups, f"hydra.searchpath=['file://{source.folder}']")
            tree, preset = _hydra(USER_CONFIG, words, fitting)
        else:
            tree, preset = _hydra_once(source.conf, tuple(groups), fitting)
    if preset == hardware.CLUSTER and not is_cluster:
        raise ConfigError(
            "hardware=cluster with launcher=local: the preset divides the nodes of a cluster; set"
            " launcher=ray or launcher=slurm, or leave hardware out"
        )
    return copy.deepcopy(tree), preset


def _hydra(conf: str, groups: tuple[str, ...], fitting: str) -> tuple[Tree, str]:
    """As `compose_files`. fitting: the preset for the machine, which hydra gets from a resolver."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        composed = hydra_compose(conf, overrides=list(groups), return_hydra_config=True)
    tree = _tree_of(composed, resolve=False)
    chosen = tree.pop("hydra")["runtime"]["choices"]
    return tree, str(chosen.get("hardware", "none"))


# The files of conf/ do not change while a process runs; a user's file may.
_hydra_once = functools.cache(_hydra)


def resolved(tree: Tree, source: Source) -> Tree:
    """Return the tree with the values of its `${...}`. Raises ConfigError."""
    with readable_errors(source, ()):
        return _tree_of(OmegaConf.create(tree), resolve=True)


def _tree_of(node: DictConfig, *, resolve: bool) -> Tree:
    tree = OmegaConf.to_container(node, resolve=resolve)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


@contextlib.contextmanager
def readable_errors(source: Source, groups: Sequence[str]) -> Iterator[None]:
    """Raise ConfigError, with the file, for an error of hydra, OmegaConf or yaml.

    groups: the overrides that choose files.
    """
    try:
        yield
    except MissingConfigException as error:
        options = ", ".join(error.options or names())
        # An override names a file as the user's own file does.
        raise ConfigError(
            f"conf={source.conf} with {' '.join(groups) or 'its defaults'}: there is no file"
            f" conf/{error.missing_cfg_file}; there are {options} (a model is named by model.path)"
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(
            f"conf={source.conf}: {_one_line(error)}; each ${{...}} must name a setting"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def with_files(with_them: Any, without: Any, *, _root_: DictConfig) -> Any:
    """The first value where the run trains or is evaluated on files of the user's, the second on
    the embedded task.
    """
    if _root_.data.train_files or _root_.data.val_files:
        return with_them
    return without
