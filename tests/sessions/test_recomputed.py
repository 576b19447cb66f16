"""What a session trains, computed again by the learner's forward pass with the weights of each
token's version, and token by token on the keys and values that older weights left.
"""

import asyncio
import tempfile
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from composing import compose
from generation_support import make_model, model_of, replay
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_support import paths_of
from sessions_support import (
    TEMPLATES,
    Words,
    answered,
    changed,
    group_with,
    said,
    sample_of,
)  # fmt: skip

from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import pack
from async_rl.buffer.tickets import check_group
from async_rl.core.heads import pack_group, read_group
from async_rl.core.types import (
    CodeProblem,
    Group,
    IntArray,
    Prompt,
    Purpose,
    Sampling,
    Ticket,
    Trajectory,
)
from async_rl.generation.engine import one_completion
from async_rl.generation.hf import HfEngine, hf_opener
from async_rl.learner.loading import load_policy
from async_rl.protocol.generator import Completion
from async_rl.rollouts.agents import Agents
from async_rl.rollouts.conversation import Written
from async_rl.rollouts.journal import Journal
from async_rl.sessions import session as session_module
from async_rl.sessions.calls import Call
from async_rl.sessions.endpoint import Endpoint
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.tools import ToolForm
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec

VOCABULARY = 48
NUM_VERSIONS = 4
TEMPERATURE = 0.7
TOLERANCE = 1e-4
MOST_TOKENS = 7
TOOLS = [{"function": {"name": "f"}}]
# A start that is a whole call, so that a forced call is readable whatever the random model adds.
WHOLE_CALL = ToolForm(
    name="hermes", required='<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
)


class Fixed(Words):
    """Words of a vocabulary that does not grow; every other word has the id of one of them."""

    def __init__(self, template: str) -> None:
        super().__init__(template)
        for word in ("go", "more", " ", "\n", "so", "ü", "{", "x", *map(str, range(99))):
            if len(self.ids) < VOCABULARY:
                self.ids.setdefault(word, len(self.ids))
        self._known = dict(self.ids)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        found = super().__call__(text, add_special_tokens=add_special_tokens)["input_ids"]
        words = list(self.ids)
        self.ids = dict(self._known)
        ids = [i if i < VOCABULARY else 1 + zlib.crc32(words[i].encode()) % 40 for i in found]
        return {"input_ids": ids}


class Changing:
    """The engine, which gets the next version before the requests that `plan` says, or during."""

    def __init__(self, engine: HfEngine, publisher: SharedTensors, versions: list[Any]) -> None:
        self._engine, self._publisher, self._versions = engine, publisher, versions
        self._plan: Iterator[str] = iter(())
        self._lock = asyncio.Lock()

    async def begin(self, plan: Sequence[str]) -> None:
        self._plan = iter(plan)
        await self._load(0)

    async def _load(self, version: int) -> None:
        tensors = dict(self._versions[version].named_parameters())
        await self._engine.load_weights(self._publisher.write(version, tensors.values()))

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        async with self._lock:
            version = self._engine.version + 1
            when = next(self._plan, "") if version < NUM_VERSIONS else ""
            if when == "before":
                await self._load(version)
            # The weights change between two tokens, or after a request that is short.
            pushing = asyncio.ensure_future(self._load(version)) if when == "during" else None
            async for done in self._engine.generate(
                request_id, prompt_token_ids, num_samples, sampling
            ):
                yield done
            if pushing is not None:
                await pushing


Drawn = list[tuple[tuple[int, ...], Completion]]


class Steps:
    """An environment that takes random steps, as an agent would."""

    def __init__(self, sessions: Sessions, script: Sequence[Any]) -> None:
        self._sessions, self._script = sessions, script
        self.answered: dict[int, int] = {}
        self.reserved = -1

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        session = self._sessions[endpoint.api_key]
        session.chat.form = WHOLE_CALL
        texts = ["go "]
        threads: list[list[Any]] = [[said("go")]]
        for kind, pick, limit in self._script:
            if kind == "text":
                texts.append(await self._complete(session, texts[pick % len(texts)], pick, limit))
                continue
            thread = changed(list(threads[pick % len(threads)]), kind, pick)
            how: dict[str, Any] = {
                "tools": {"tools": TOOLS, "choice": "required"},
                "stop": {"tools": [], "stops": ("1", "x")},
            }.get(kind, {"tools": []})
            num_calls = 2 if kind == "parallel" else 1
            calls = [session.chat_call(thread, max_tokens=limit, **how) for _ in range(num_calls)]
            for answer in await asyncio.gather(*(answered(session, call) for call in calls)):
                self.answered[answer.number] = len(answer.written.token_ids)
                threads.append([*thread, answer.message])
        self.reserved = session.record.num_tokens()
        return None

    async def _complete(self, session: Any, text: str, pick: int, limit: int) -> str:
        """Continue a text without messages. The agent does not see a stop text, so that its next
        request continues a part of the recorded answer.
        """
        prompt = f"{text}more {pick} "
        context = session.chat.text_context(session.record, prompt, session.limit)
        call = Call(context=context, prompt=prompt, max_tokens=limit, stops=("1", "2", "x"))
        answer = await answered(session, call)
        self.answered[answer.number] = len(answer.written.token_ids)
        return prompt + str(answer.content)

    async def close(self) -> None:
        pass


class World:
    """The engine and its versions, and the event loop that they live in."""

    def __init__(self, path: Path, runner: asyncio.Runner) -> None:
        self.runner = runner
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "max_position_embeddings": 2048}
        first = make_model(path / "0", ends=[0], **sizes)
        models = [model_of(first, version) for version in range(NUM_VERSIONS)]
        self.models = dict(enumerate(models))
        self.policies = []
        for version, model in enumerate(models):
            model.save_pretrained(path / str(version))
            self.policies.append(load_policy(path / str(version), trust_remote_code=False))
        specs = [tensor_spec(name, value) for name, value in models[0].named_parameters()]
        self._publisher = SharedTensors(specs)
        self._engine = runner.run(hf_opener(compose("grpo_code", []), path / "0", 0)())
        self.engine = Changing(cast(Any, self._engine), self._publisher, models)

    def close(self) -> None:
        self.runner.run(self._engine.close())
        self._publisher.close()

    @torch.no_grad()
    def recomputed(self, group: Group) -> list[Any]:
        """The learner's log-probs of the response tokens of all samples, per version."""
        batch = collate_part(whole([group]), device=torch.device("cpu"))
        row = pack(batch, range(len(group.trajectories)), device=torch.device("cpu"))
        found = []
        for policy in self.policies:
            table = torch.zeros(batch.num_tokens)
            output = policy(row, temperature=TEMPERATURE, chunk_tokens=1024)
            table[row.token_index] = output.logprobs
            found.append(table.numpy())
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(session_module, "PIECE_TOKENS", 3)
        # The form that is read in the gateway.
        patch.setattr("async_rl.sessions.chat.HERMES", WHOLE_CALL)
        made = World(tmp_path_factory.mktemp("models"), runner)
        yield made
        made.close()


async def sampled(
    world: World, template: str, script: Sequence[Any], plan: Sequence[str], folder: Path
) -> tuple[Ticket, list[Written], Drawn, list[Steps]]:
    """Two samples of a prompt that the same agent made. The second one begins elsewhere."""
    words = Fixed(template)
    ids = np.array(words("go\n", add_special_tokens=True)["input_ids"], np.int32)
    problem = CodeProblem(tests=[cast(Any, None)], row="{}")
    prompt = Prompt(prompt_id="p", text="go", token_ids=ids, data_source="", problem=problem)
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=1500)
    how: Any = {"group_id": 1, "attempt": 1, "purpose": Purpose.TRAIN, "num_samples": 2}
    ticket = Ticket(**how, admitted_version=0, prompt=prompt, sampling=sampling)
    await world.engine.begin(plan)
    config = compose("grpo_code", ["rollout.fn=[a:b]", "rollout.max_turns=99"])
    drawn: Drawn = []

    async def write(name: str, before: IntArray, sampling: Sampling) -> Completion:
        done = await one_completion(cast(Any, world.engine), name, before, sampling)
        drawn.append((tuple(before.tolist()), done))
        return done

    made, environments = [], []
    for index in range(2):
        sessions = Sessions()
        environments.append(Steps(sessions, script[index:] or script))
        where: Any = {"sessions": sessions, "environments": environments[-1], "url": ""}
        agents = Agents(config, tokenizer=words, journal=Journal(folder, "1"), **where)
        made.append(await agents.sample(ticket, index, ticket.sampling, write, cast(Any, None)))
    return ticket, made, drawn, environments


def trained(sample: Trajectory) -> Iterator[tuple[Any, ...]]:
    """(tokens before, token, log-prob, version) of every trained token."""
    paths = paths_of(sample)
    for at in np.flatnonzero(sample.loss_mask):
        before = tuple(sample.token_ids[paths[at][:-1]].tolist())
        logprob, version = float(sample.behavior_logprobs[at]), int(sample.versions[at])
        yield (before, int(sample.token_ids[at]), logprob, version)


def written(drawn: Drawn) -> Iterator[tuple[Any, ...]]:
    """The same of each token that the engine wrote."""
    for before, done in drawn:
        ids = tuple(done.token_ids.tolist())
        for at, token in enumerate(ids):
            logprob, version = float(done.logprobs[at]), int(done.versions[at])
            yield ((*before, *ids[:at]), token, logprob, version)


KINDS = ("branch", "compact", "edit", "tools", "stop", "parallel", "text", "text", "continue")
STEPS = st.tuples(
    st.sampled_from(KINDS), st.integers(0, 9), st.sampled_from([MOST_TOKENS, MOST_TOKENS, 2])
)


@settings(max_examples=10)
@given(
    template=st.sampled_from(TEMPLATES),
    script=st.lists(STEPS, min_size=2, max_size=6),
    plan=st.lists(st.sampled_from(["", "before", "during"]), max_size=12),
)
def test_what_is_trained_is_what_the_weights_of_its_version_wrote(
    world: World, template: str, script: Any, plan: Any
) -> None:
    assert_true_logprobs(world, template, script, plan)


def assert_true_logprobs(world: World, template: str, script: Any, plan: Any) -> Counter[int]:
    """Check one pair of sessions; return how many tokens of each version they train, and, under
    -1, how many were drawn after a push within their request.
    """
    # In every order of the steps there is an answer to train.
    script = [*script, ("continue", 0, MOST_TOKENS)]
    with tempfile.TemporaryDirectory() as name:
        # A journal removes what other runs left beside its folder, so that needs a parent.
        folder = Path(name) / "sessions" / "gateway-0"
        ticket, made, drawn, environments = world.runner.run(
            sampled(world, template, script, plan, folder)
        )
    samples = [sample_of(ticket.prompt.token_ids, done, 1.0) for done in made]
    counts: Counter[int] = Counter()
    left = Counter(written(drawn))
    after_push: set[tuple[Any, ...]] = set()
    for before, done in drawn:
        ids, versions = done.token_ids.tolist(), done.versions.tolist()
        expected = replay(world.models, before, ids, versions, TEMPERATURE)
        assert np.abs(expected - done.logprobs).max() < TOLERANCE
        rows = zip(versions, written([(before, done)]), strict=True)
        after_push |= {row for version, row in rows if version != versions[0]}
    for sample, steps in zip(samples, environments, strict=True):
        check_group(
            read_group(pack_group(group_with([sample]))),
            ticket.prompt.token_ids,
            newest_version=NUM_VERSIONS,
            vocabulary_size=VOCABULARY,
        )
        found = Counter(trained(sample))
        # The engine wrote each trained token after exactly these tokens; none is trained twice.
        assert not found - left
        left -= found
        assert found.total() == sum(steps.answered.values())
        # No call that ended keeps room that others could use.
        assert len(sample.token_ids) - sample.prompt_length == steps.reserved
    tables = world.recomputed(group_with(samples))
    start = 0
    for sample in samples:
        places = start - sample.prompt_length + np.flatnonzero(sample.loss_mask)
        start += len(sample.token_ids) - sample.prompt_length
        for at, (before, token, logprob, version) in zip(places, trained(sample), strict=True):
            # The learner has no keys and values of older weights.
            if (before, token, logprob, version) in after_push:
                counts[-1] += 1
            else:
                assert abs(tables[version][at] - logprob) < TOLERANCE
            counts[version] += 1
    return counts


def test_weights_change_inside_one_answer_and_between_answers(world: World) -> None:
    """The examples above may be few for a given interleaving; here each version occurs, and tokens
    after a push have read the keys of older weights.
    """
    script = [("stop", 0, MOST_TOKENS), ("continue", 1, 2), ("stop", 2, MOST_TOKENS)] * 2
    counts = assert_true_logprobs(world, TEMPLATES[0], script, ["", "before"] * 6)
    assert set(counts) == set(range(NUM_VERSIONS))
    counts = assert_true_logprobs(world, TEMPLATES[0], [("continue", 0, 400)] * 2, ["during"] * 9)
    assert counts[-1] > 0
