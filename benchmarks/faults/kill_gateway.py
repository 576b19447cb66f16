"""Kill -9 the gateway of a run while programs outside the run use their sessions.

Each program has two turns by the package openai (a stream) and two by anthropic, with the packages'
own retries, then posts a reward and ends its session. The gateway is killed while the answer of a
streamed call arrives, while a call is open, between two calls, and between reward and end. A
program whose stream breaks sends the request again, as it would without a run. Printed is a line
for each kill, and what the run has trained: no session may be lost, no attempt may fail.

Run: `python -m benchmarks.faults.kill_gateway [--kills N] [key=value ...]`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from benchmarks.faults.chaos_audit import audit, reading
from benchmarks.faults.chaos_run import NO_PROGRESS_S, Run

SETTINGS = (
    "conf=grpo_code",
    "rollout.fn=external",
    "generation.engine=hf",
    "data.max_response_tokens=176",
    "buffer.groups_per_step=2",
    "generation.group_size=2",
    "evaluation.every_steps=0",
    "monitoring.tensorboard_port=null",
    "supervisor.max_restarts=1000",
)
PLACES = ("in a stream", "in a call", "between calls", "between reward and end")
_RETRIES = 12


class Killer:
    """Kills the gateway when the next program comes to a place."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self.place = ""

    def at(self, place: str) -> None:
        """Kill, if this is the place."""
        with self._lock:
            if place == self.place:
                self.place = ""
                os.kill(self._run.children()["gateway-0"].pid, signal.SIGKILL)


class Program:
    """Sessions, one after the other."""

    def __init__(self, run: Run, killer: Killer) -> None:
        self._run, self._killer = run, killer
        self.num_done = 0
        self.problems: list[str] = []

    def work(self) -> None:
        """Take sessions until the run has ended."""
        while self._run.process.poll() is None:
            try:
                file = self._run.run_dir / "gateways" / "gateway-0.json"
                gateway = json.loads(file.read_text())
                key = {"Authorization": f"Bearer {gateway['api_key']}"}
                reply = httpx.post(
                    gateway["sessions_url"], headers=key, json={"wait_s": 5}, timeout=20
                )
            except (OSError, ValueError, httpx.HTTPError):
                time.sleep(0.5)
                continue
            if reply.status_code == 201:
                try:
                    self._play(reply.json())
                    self.num_done += 1
                except (openai.OpenAIError, anthropic.AnthropicError, httpx.HTTPError) as error:
                    if self._run.process.poll() is None:
                        self.problems.append(repr(error)[:300])

    def _play(self, session: dict[str, Any]) -> None:
        key, model = session["api_key"], session["model"]
        chat = openai.OpenAI(base_url=session["base_url"], api_key=key, max_retries=_RETRIES)
        claude = anthropic.Anthropic(
            base_url=session["anthropic_base_url"], api_key=key, max_retries=_RETRIES
        )
        messages = [{"role": "user", "content": session["task"]["prompt"]}]
        for turn in range(2):
            messages.append({"role": "assistant", "content": self._stream(chat, model, messages)})
            messages.append({"role": "user", "content": "again"})
            self._killer.at("between calls")
            if turn == 0:
                threading.Timer(0.05, self._killer.at, ["in a call"]).start()
                said = claude.messages.create(model=model, messages=messages, max_tokens=20)  # type: ignore[arg-type]
                text = "".join(block.text for block in said.content if block.type == "text")
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": "again"})
        self._post(session, "reward", random.random())
        self._killer.at("between reward and end")
        self._post(session, "end", {})

    def _stream(self, chat: openai.OpenAI, model: str, messages: Any) -> str:
        headers: dict[str, str] = {}
        while True:
            try:
                text = ""
                for chunk in chat.chat.completions.create(
                    model=model,
                    messages=messages,
                    max_tokens=40,
                    stream=True,
                    extra_headers=headers,
                ):
                    if chunk.choices and chunk.choices[0].delta.content:
                        text += chunk.choices[0].delta.content
                        self._killer.at("in a stream")
                return text
            except (httpx.HTTPError, openai.APIConnectionError):
                # The package retries no stream that has begun.
                headers = {"Idempotency-Key": str(len(messages))}

    def _post(self, session: dict[str, Any], what: str, body: Any) -> None:
        headers = {
            "Authorization": f"Bearer {session['session_key']}",
            "Idempotency-Key": what,
        }
        url = f"{session['session_url']}/{what}"
        for _ in range(60):
            try:
                reply = httpx.post(url, headers=headers, json=body, timeout=90)
                if reply.status_code < 500:
                    reply.raise_for_status()
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise httpx.TransportError(f"{what} was not answered")


def main() -> int:
    """Kill at each place in turn; return 1 if something was lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    run = Run(folder, [*SETTINGS, "num_steps=100000", *given.settings], random.Random(0))
    killer = Killer(run)
    programs = [Program(run, killer) for _ in range(4)]
    threads = [threading.Thread(target=program.work, daemon=True) for program in programs]
    for thread in threads:
        thread.start()
    if not run.until_progress(0):
        print(f"the run did not start: {run.last_line}")
        return 1
    for number in range(given.kills):
        place = killer.place = PLACES[number % len(PLACES)]
        started_s = time.monotonic()
        while killer.place:
            time.sleep(0.02)
        killed_s = time.monotonic()
        steps = run.num_commits()
        if not run.until_progress(steps + 1):
            print(f"no step within {NO_PROGRESS_S:g} s after a kill {place}: {run.last_line}")
            return 1
        print(
            f"killed {place} after {killed_s - started_s:.1f} s; two steps more after"
            f" {time.monotonic() - killed_s:.1f} s",
            flush=True,
        )
    # Before the run stops, which ends the open sessions.
    problems = [problem for program in programs for problem in program.problems]
    run.process.send_signal(signal.SIGTERM)
    run.process.wait()
    with reading(run.run_dir) as store:
        reasons = failed_of(store)
    print(f"{sum(p.num_done for p in programs)} sessions ended; failed attempts: {reasons}")
    broken = list(audit(run.run_dir, groups_per_step=2, max_staleness=2))
    print(*problems, *broken, sep="\n")
    return min(1, len(problems) + len(broken))


def failed_of(store: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """Return the reasons of failed attempts with their numbers."""
    return store.execute(
        "SELECT reason, count(*) FROM transitions WHERE reason IS NOT NULL AND reason != ''"
        " GROUP BY reason"
    ).fetchall()


sys.exit(main())
