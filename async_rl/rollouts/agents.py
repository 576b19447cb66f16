"""The rollout of one sample by an agent: a session is opened, its environment runs, and its turns
become the sample.

takes: a ticket, and the place of the sample in its group
waits for: the environment
returns: the sample, with its reward if the environment gave one

Raises AgentError if the environment fails, never calls the policy, or leaves a sample without a
reward; the attempt is then given up and counted, and nothing of it is trained.
"""

import asyncio
import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from async_rl.config.generation import PARSERS
from async_rl.config.run import RunConfig
from async_rl.core.calls import AgentCall, Alternatives, Support
from async_rl.core.errors import AgentError, EngineDead
from async_rl.core.types import (
    CodeProblem,
    CodeTest,
    IntArray,
    Prompt,
    Sampling,
    Score,
    Ticket,
    Verdict,
)
from async_rl.protocol.generator import Completion
from async_rl.rewards.scoring import VerifierClient
from async_rl.rollouts.conversation import Write, Written
from async_rl.rollouts.environments import Environments
from async_rl.rollouts.journal import Journal
from async_rl.sessions.calls import Reward, Usage, parts_of
from async_rl.sessions.chat import Chat, Reader
from async_rl.sessions.endpoint import Endpoint
from async_rl.sessions.errors import Refused
from async_rl.sessions.forms.form import read
from async_rl.sessions.open_sessions import Offers, Sessions
from async_rl.sessions.record import Record
from async_rl.sessions.requests import repeat
from async_rl.sessions.session import Session

_MOST_NAMES = 20
"""Environments that have separate metrics; a name per row would fill every heartbeat."""
_PLAIN = str.maketrans("/<>", "___")
_RAN = (Verdict.PASS, Verdict.WRONG_ANSWER)


class Agents:
    """Makes samples with environments. url: of the endpoint of `sessions`; journal: what earlier
    lives of this gateway served; read_calls: lets a generator read tool calls.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        tokenizer: Any,
        sessions: Sessions,
        environments: Environments,
        journal: Journal,
        url: str,
        read_calls: Reader | None = None,
    ) -> None:
        self._config = config
        parsers = map(config.generation.vllm.parser, PARSERS)
        self._chat = Chat(tokenizer, *parsers, read=read_calls)
        self._sessions = sessions
        self._environments = environments
        self._journal = journal
        self._url = url
        self._environments_seen: set[str] = set()

    async def sample(
        self,
        ticket: Ticket,
        index: int,
        sampling: Sampling,
        write: Write,
        verifier: VerifierClient,
    ) -> Written:
        """Return one sample. verifier: runs the programs of its Python tool."""
        name = f"{ticket.group_id}.{ticket.attempt}.{index}"
        session_name = self._journal.name_of(ticket, index)

        async def answer(
            call: str, token_ids: IntArray, limit: int, support: Support, shown: Alternatives
        ) -> Completion:
            limited = replace(sampling, max_new_tokens=limit, support=support, alternatives=shown)
            # An agent that starts again repeats its calls; new answers would waste drawn tokens.
            if known := self._journal.take(ticket, index, token_ids, limited):
                return known
            if is_returning:
                raise Refused("no life of the gateway has written this answer")
            try:
                completed = await write(f"{name}/{call}", token_ids, limited)
            except EngineDead as error:
                # Its client would send it again. The attempt fails with the cause instead.
                session.close(f"a call ended its engine: {error}")
                if not failing.done():
                    failing.set_result(AgentError(session.closed))
                raise
            self._journal.add(ticket, index, token_ids, limited, completed)
            return completed

        failing: asyncio.Future[AgentError] = asyncio.get_running_loop().create_future()
        task = task_of(ticket, index)
        token, session_key = self._sessions.keys(session_name)
        session = Session(
            token=token,
            session_key=session_key,
            record=Record(ticket.prompt.token_ids),
            chat=self._chat,
            write=answer,
            limit=sampling.max_new_tokens,
            support=sampling.support,
            max_turns=self._config.rollout.max_turns,
            usage=Usage(environment=self.environment_of(task["row"])),
            run=functools.partial(_run, verifier),
        )
        endpoint = Endpoint.of(self._url, token, session_key)
        is_returning = True
        if isinstance(self._environments, Offers):
            if (noted := self._journal.returning.get(session_name)) is not None:
                self._environments.resume(endpoint, task, await repeat(session, noted))
            session.note = functools.partial(self._journal.note, session_name)
        is_returning = False
        # Closed before the sample is made: no call that is still open can add to it.
        with self._sessions.open(session):
            self._journal.returning.pop(session_name, None)
            running = asyncio.ensure_future(self._environments.run(endpoint, task))
            try:
                await asyncio.wait((failing, running), return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    raise failing.result()
                returned = running.result()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        return self._written(ticket.prompt, session, returned)

    def environment_of(self, row: dict[str, Any]) -> str:
        """The name under which a sample is counted: the environment of its row, else the agent."""
        name = row.get("environment")
        if not isinstance(name, str) or len(self._environments_seen | {name}) > _MOST_NAMES:
            return self._config.agent.name
        self._environments_seen.add(name)
        # Names of metrics have slashes between their parts.
        return name.translate(_PLAIN)

    def _written(self, prompt: Prompt, session: Session, returned: Any) -> Written:
        if not any(turn.caller.is_trained for turn in session.record.turns.values()):
            raise AgentError(
                f"the agent exited without a call that is trained; {session.why_silent}"
            )
        tokens, branches, ends = session.record.row()
        calls = credited(session, ends)
        rewards = [*session.rewards, *returned_rewards(returned)]
        needs = self._config.reward.needs_tests(prompt.data_source)
        is_scorable = not needs or bool(prompt.problem.tests)
        if not rewards and not is_scorable:
            raise AgentError(
                "the agent gave no reward, and its row has no tests that the verifiers could run;"
                " return a reward, post one, or add tests to the row"
            )
        score = None
        if not is_scorable or any(reward.is_whole for reward in rewards):
            score = score_of(rewards)
        return Written(
            # The session knows: a call that found no room truncates the sample too.
            tokens=replace(tokens, is_truncated=session.is_truncated),
            answer=session.last_text,
            transcript=self._chat.decode(tokens.token_ids),
            branches=branches,
            score=score,
            calls=calls,
        )


class _Program(msgspec.Struct, kw_only=True):
    """A request of the Python tool: a program, and tests that it is to run."""

    program: str
    tests: list[CodeTest]
    setup: str = ""


async def _run(verifier: VerifierClient, body: bytes) -> tuple[Any, bool]:
    """Run a program in the jail; return the verdict and the message of each test, and whether the
    program failed to run: a wrong answer is the outcome of one that ran.
    """
    request: _Program = read(body, _Program)
    problem = CodeProblem(tests=request.tests, setup=request.setup)
    results = await verifier.verify(problem, request.program, stops=False)
    shown = [{"verdict": str(result.verdict), "message": result.message} for result in results]
    return shown, any(result.verdict not in _RAN for result in results)


def task_of(ticket: Ticket, index: int) -> dict[str, Any]:
    """Return the task that the environment receives, without a hidden answer outside its row."""
    prompt = ticket.prompt
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "purpose": str(ticket.purpose),
        "sample": index,
        "row": msgspec.json.decode(prompt.problem.row or "{}"),
        "tests": msgspec.to_builtins(prompt.problem.tests),
    }


def credited(session: Session, ends: Mapping[int, int]) -> tuple[AgentCall, ...]:
    """Return the calls of a session with their rewards. ends: of the trained ones in the row. The
    reward of a role is that of its last trained call. Raises AgentError if there is none.
    """
    served = dict(sorted(session.served.items()))
    rewards: dict[int, float] = collections.defaultdict(float)
    last = {call.role: number for number, call in served.items() if number in ends}
    for reward in session.rewards:
        numbers = reward.numbers
        if reward.role is not None:
            numbers = [last.get(reward.role, -1)]
        for number in numbers:
            rewards[number] += sum(reward.parts.values())
    if rewards.keys() - ends.keys():
        raise AgentError(
            f"a reward is for a call or a role that is not trained; the roles {sorted(last)} are"
        )
    return tuple(
        replace(
            call,
            end_tokens=ends.get(number, 0),
            reward=rewards[number],
            number=place,
            of=len(served),
        )
        for place, (number, call) in enumerate(served.items(), 1)
    )


def returned_rewards(value: Any) -> list[Reward]:
    """Return the reward that an environment returned; none for nothing and an empty dict. Raises
    AgentError for a value that is not a reward.
    """
    if value in (None, {}):
        return []
    try:
        return [Reward(parts=parts_of(value))]
    except Refused as error:
        raise AgentError(str(error)) from error


def score_of(rewards: Sequence[Reward]) -> Score:
    """Return the sum of the rewards of a sample."""
    parts: dict[str, float] = collections.defaultdict(float)
    for reward in rewards:
        for name, value in reward.parts.items():
            parts[name] += value
    total = sum(parts.values())
    # `reward` is the name of a plain number, which is in the total only.
    named = {name: value for name, value in parts.items() if name != "reward"}
    return Score(reward=total, parts=named, verdicts=(), latency_s=0.0)
