"""The argument of the command of a child process, which its starter writes and main.py reads."""

from async_rl.core.frozen import Value
from async_rl.planning.topology import ProcessSpec


class Start(Value):
    """parent_pid: the process exits with it; 0 = with its starter. announces: the first line of
    output is the process id.
    """

    spec: ProcessSpec
    run_dir: str
    parent_pid: int
    announces: bool = False
