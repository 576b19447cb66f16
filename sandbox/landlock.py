"""Landlock rulesets for a program: the paths that it may read, and those that it may write.

A ruleset must be created after the last mount, because a rule on a directory that a later mount
hides does not apply.
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


def create_ruleset(
    readable: Sequence[str], writable: Sequence[str], runnable: Sequence[str] | None = None
) -> int:
    """Descriptor of a ruleset; -1 if the kernel has no Landlock.

    runnable: the only paths whose files can be executed; None for all readable and writable ones.
    Paths that do not exist are left out.
    """
    abi = linux.landlock_abi()
    if abi == 0:
        return -1
    handled = (1 << _ACCESS_BITS.get(abi, 16)) - 1
    # Older kernels refuse fields that they do not know, so the structure ends with the last known.
    fields = [handled]
    if abi >= _NETWORK_ABI:
        fields.append(3)  # bind and connect
    if abi >= _SCOPE_ABI:
        fields.append(3)  # abstract sockets and signals
    ruleset = linux.landlock_create(struct.pack(f"{len(fields)}Q", *fields))
    write = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
    rules = [(readable, _READ), (writable, write)]
    if runnable is not None:
        rules = [(paths, access & ~_EXECUTE) for paths, access in rules]
        rules.append((runnable, _READ))
    for paths, access in rules:
        for path in paths:
            if os.path.exists(path):
                allowed = access & handled
                if not os.path.isdir(path):
                    allowed &= _FILE_ONLY
                linux.landlock_allow(ruleset, path, allowed)
    return ruleset
