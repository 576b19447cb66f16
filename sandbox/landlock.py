"""Landlock rulesets for a program: what it may read, and the one directory it may write to.

A ruleset must be made after the last mount: a rule on a directory that a later mount hides does not
apply. Used by `zygote.py`, which makes one ruleset and hands it to each child.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

from . import linux

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_DIR, _REMOVE_FILE = 16, 32
_MAKE_DIR, _MAKE_REG = 128, 256
_TRUNCATE = 1 << 14
_READ = _READ_FILE | _READ_DIR | _EXECUTE
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
_NETWORK_ABI, _SCOPE_ABI = 4, 6


def create_ruleset(readable: Sequence[str], writable: Sequence[str]) -> int:
    """Descriptor of a ruleset; -1 where the kernel has no Landlock. Paths that do not exist are
    left out.
    """
    abi = linux.landlock_abi()
    if abi == 0:
        return -1
    handled = (1 << _ACCESS_BITS.get(abi, 16)) - 1
    network = 3 if abi >= _NETWORK_ABI else 0
    scoped = 3 if abi >= _SCOPE_ABI else 0
    ruleset = linux.landlock_create(
        struct.pack("QQQ", handled, network, scoped)[: 24 if scoped else 16 if network else 8]
    )
    write = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
    for paths, access in ((readable, _READ), (writable, write)):
        for path in paths:
            if os.path.exists(path):
                linux.landlock_allow(
                    ruleset, path, access & handled & (-1 if os.path.isdir(path) else _FILE_ONLY)
                )
    return ruleset
