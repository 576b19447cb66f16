"""Functions that users bring, through a real verifier process: what they get, what becomes of what
they give, and how they fail.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from composing import compose, compose_unchecked
from rewards_support import sample_of
from tables import table
from verifier_support import verifier_process

from async_rl.config.base import replace
from async_rl.config.checks.run import problems
from async_rl.config.rewards import PluginTerm, ProvidedTerm, RewardTerm
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, RewardError, root_cause
from async_rl.core.types import CallTest, CodeProblem, Verdict
from async_rl.rewards.functions import check_functions
from async_rl.rewards.scoring import VerifierClient
from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.rewards.verifier.reward_process import RewardProcess

HERE = Path(__file__).parent / "reward_functions_for_tests.py"
ROW = {"wanted": "yes", "prompt": "ask"}
SAMPLE = sample_of("oh yes", 2, prompt="ask", data_source="mine", row=ROW, max_tokens=9)


def term(function: str) -> RewardTerm:
    if function in ("xml_format", "length"):
        return ProvidedTerm(kind=function, weight=1.0, sources=[])
    fn = function if ":" in function else f"{HERE}:{function}"
    return PluginTerm(kind="plugin", fn=fn, weight=1.0, sources=[])


def run_config(*functions: str, function_s: float = 10, **settings: object) -> RunConfig:
    config = compose("grpo_code", ["verifiers.cells=1", "sandbox.packages=[]"])
    terms = {function.rpartition(":")[2]: term(function) for function in functions}
    reward = replace(config.reward, terms=terms, **settings)
    timeouts = replace(config.timeouts, group_s=12 * function_s)
    return replace(config, reward=reward, timeouts=timeouts)


@asynccontextmanager
async def running(config: RunConfig) -> AsyncIterator[VerifierClient]:
    """A verifier process of its own, which leaves no process."""
    before = set(psutil.Process().children(recursive=True))
    async with asyncio.timeout(60), verifier_process(config) as client:
        yield client
    assert set(psutil.Process().children(recursive=True)) <= before


def saying(response: str) -> RewardSample:
    return msgspec.structs.replace(SAMPLE, response=response)


async def test_functions_plain_and_async_give_a_score_or_parts() -> None:
    async with running(
        run_config("letters", "in_parts", "with_score", "sees", "xml_format", "length")
    ) as client:
        names = ["letters", "in_parts", "with_score", "sees"]
        scores = await client.ask_functions([*names, "xml_format", "length"], SAMPLE)
        assert scores == {
            "letters": {"score": 6.0},
            "in_parts": {"score": pytest.approx(1.4), "short": pytest.approx(0.4), "wanted": 1.0},
            "with_score": {"score": 0.25, "detail": 7.0},
            "sees": {"score": 1.0},
            "xml_format": {"score": 0.0},
            "length": {"score": pytest.approx(2 / 9)},
        }
        with pytest.raises(RewardError, match=r"knows no function os:getcwd"):
            await client.ask_functions(["os:getcwd"], SAMPLE)


@asynccontextmanager
async def asking(config: RunConfig) -> AsyncIterator[Callable[..., Coroutine[Any, Any, object]]]:
    """A function that asks the process of functions: the score of a response or the reason why it
    has none.
    """
    rewards = RewardProcess(config.reward, timeouts=config.timeouts)

    async def ask(function: str, response: str = "good") -> object:
        found: object = None
        try:
            found = (await rewards.score([function], saying(response)))[function]["score"]
        except* RewardError as errors:
            found = str(root_cause(errors))
        return found

    async with asyncio.timeout(60):
        yield ask
    await rewards.close()


async def test_a_function_that_fails_says_how_and_its_neighbours_get_their_scores() -> None:
    async with asking(run_config("by_response")) as ask:
        for response, said in table(__file__, "a_function_that_fails_says"):
            failed, other = await asyncio.gather(
                ask("by_response", response), ask("by_response", "good")
            )
            assert said in str(failed)
            assert other == 1.0


async def test_a_function_that_hangs_is_ended_at_its_deadline_and_others_are_repeated() -> None:
    async with asking(run_config("by_response", "slow", function_s=1.5)) as ask:
        hanging = asyncio.create_task(ask("by_response", "hang"))
        while not hanging.done():  # one is in the process when it is ended
            assert await ask("slow") == 1.0
        said = "by_response gave no score within 1.5 s (timeouts.group_s / 12)"
        assert said in str(await hanging)


async def test_a_function_that_blocks_the_event_loop_is_blamed_not_the_calls_it_delays() -> None:
    async with asking(run_config("blocks", "slow", function_s=1.5)) as ask:
        innocent = [asyncio.create_task(ask("slow")) for _ in range(3)]
        await asyncio.sleep(0)  # they are asked first, so that their deadlines come first
        blocking = asyncio.create_task(ask("blocks", "block"))
        assert [await call for call in innocent] == [1.0] * 3
        failed = str(await blocking)
        assert "blocks gave no score within 1.5 s" in failed
        assert "define it with def" in failed
        assert await ask("blocks", "good") == 1.0


async def test_calls_run_side_by_side_up_to_reward_concurrency() -> None:
    async with asking(run_config("threads", concurrency=2)) as ask:
        assert await asyncio.gather(*(ask("threads") for _ in range(4))) == [2.0] * 4


async def test_neither_calls_nor_programs_wait_for_slow_calls_that_were_sent_before() -> None:
    async with running(run_config("held", "letters")) as client:
        problem = CodeProblem(tests=[CallTest(function="f", args=[1], expected=1)])
        await client.verify(problem, "def f(x):\n    return x")
        held = [asyncio.create_task(client.ask_functions(["held"], SAMPLE)) for _ in range(8)]
        for _ in held:
            await asyncio.sleep(0.02)  # each is sent alone
        assert await client.ask_functions(["letters"], SAMPLE) == {"letters": {"score": 6.0}}
        (found,) = await client.verify(problem, "def f(x):\n    return x + 0")
        assert found.verdict is Verdict.PASS
        assert not any(call.done() for call in held)
        assert await client.ask_functions(["held"], saying("go")) == {"held": {"score": 1.0}}
        assert [await call for call in held] == [{"held": {"score": 1.0}}] * 8


@pytest.mark.parametrize(("function", "said"), table(__file__, "a_wrong_name"))
def test_a_wrong_name_is_refused_before_anything_starts(function: str, said: str) -> None:
    function = function.replace("HERE", str(HERE))
    config = compose("grpo_code", [f"reward.terms.mine={function}"])
    (found,) = check_functions(config.reward)
    assert found.startswith(f"reward.terms.mine.fn={function}: ")
    assert said in found


def found(*overrides: str) -> list[str]:
    return list(problems(compose_unchecked("grpo_code", list(overrides))))


def test_settings_that_contradict_each_other_are_refused() -> None:
    terms = ("reward.terms.tests=tests", "reward.terms.length=length")
    assert found(*terms, "reward.terms.length.weight=-0.1") == []
    assert found("reward.terms.length=length", "reward.placement=steps") == []
    assert "does not show progress" in found(*terms, "reward.placement=steps")[0]
    assert "have the name tests" in found("reward.terms.tests=length")[0]
    assert "becomes the name of metrics" in found("reward.terms.a-b=length")[0]
    assert "reward.format_reward=2 with reward.pass" in found("reward.format_reward=2")[0]


@pytest.mark.parametrize(("override", "said"), table(__file__, "a_term_without_what_its"))
def test_a_term_without_what_its_kind_needs_cannot_be_written(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose("grpo_code", [override])
    assert said in str(refused.value)
