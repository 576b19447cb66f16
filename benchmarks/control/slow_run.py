"""Make the runs of docs/tutorials/slow_run.md and print what its commands show.

Run: `python -m benchmarks.control.slow_run DIR` (six minutes on two cores). A run with a slow
judge, the changes that `async-rl explain` names for it, each alone, and one with more verifiers,
which `async-rl plan` forecasts. The directory must not exist; it keeps the runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from async_rl.runs.forecast.reports import predict
from async_rl.runs.forecast.scenario import Values, profile_of, with_values
from async_rl.runs.forecast.simulation import simulate
from async_rl.runs.status import config_of

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/slow_run.md"
PROGRAM = str(Path(sys.executable).with_name("async-rl"))
FASTER: Values = {"verifiers.count": 4}
_FILE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LAUNCH = re.compile(r"^\$ async-rl launch (.*run_name=slow)$", re.MULTILINE)


def shown(folder: Path, *words: str) -> str:
    """Return the output of a command."""
    command = [PROGRAM, *words]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=True)
    return f"$ async-rl {' '.join(words)}\n{done.stdout}"


def words_of(case: Values) -> list[str]:
    """Return a change as words of `async-rl launch`."""
    if case == {"scoring_speed": 2}:
        return ["reward.terms.judge=judge.py:short_judge"]
    return [f"{key}={value:g}" for key, value in case.items()]


def main() -> None:
    """Make the runs, one after another, and print the outputs and a table."""
    folder = Path(sys.argv[1])
    folder.mkdir()
    page = PAGE.read_text()
    for name, text in _FILE.findall(page):
        (folder / name).write_text(text)
    found = _LAUNCH.search(page)
    assert found
    slow = found[1].split()

    def launch(name: str, changes: list[str]) -> float:
        changed = {word.partition("=")[0] for word in (*changes, "run_name=")}
        words = [word for word in slow if word.partition("=")[0] not in changed]
        shown(folder, "launch", *words, *changes, f"run_name={name}")
        run_dir = folder / "runs" / name
        return profile_of(run_dir, config_of(run_dir)).recorded.steps_per_s

    own = launch("slow", [])
    print(shown(folder, "explain", "slow"))
    source = profile_of(folder / "runs/slow", config_of(folder / "runs/slow"))
    for number, change in enumerate(predict(source)[1]):
        words = words_of(change.case)
        gain = launch(f"change{number}", words) / own - 1
        print(f"| `{' '.join(words)}` | {change.gain:+.0%} | {gain:+.0%} |", flush=True)
    print(shown(folder, "plan", "slow", "verifiers.count=1,2,4,8"))
    predicted = simulate(with_values(source, FASTER), source.recorded).steps_per_s
    measured = launch("faster", words_of(FASTER))
    print(f"faster: predicted {predicted * 3600:.0f} steps/hour, measured {measured * 3600:.0f}")
    print(shown(folder, "explain", "faster"))
    print(shown(folder, "compare", "slow", "faster"))


if __name__ == "__main__":
    main()
