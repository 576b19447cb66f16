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
from composing import compose_unchecked
from rewards_support import sample_of, verifier_process
from tables import table

from async_rl.config.checks.run import problems
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


def run_config(*functions: str, function_s: float = 10, **settings: object) -> RunConfig:
    given = ["verifiers.cells=1", "sandbox.packages=[]", f"timeouts.group_s={12 * function_s}"]
    for name in functions:
        is_provided = name in ("xml_format", "length")
        given.append(f"reward.terms.{name}={name if is_provided else f'{HERE}:{name}'}")
    given += [f"reward.{name}={value}" for name, value in settings.items()]
    return compose_unchecked("grpo_code", given)


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
    names = ["letters", "in_parts", "xml_format", "length"]
    async with running(run_config(*names)) as client:
        assert await client.ask_functions(names, SAMPLE) == {
            "letters": {"score": 6.0},
            "in_parts": {"score": pytest.approx(1.4), "short": pytest.approx(0.4), "wanted": 1.0},
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


@pytest.mark.parametrize("case", table(__file__, "refused"), ids=lambda case: case["said"])
def test_a_wrong_name_or_setting_is_refused_before_anything_starts(case: dict[str, Any]) -> None:
    given = [setting.replace("HERE", str(HERE)) for setting in case["settings"]]
    said = ""
    try:
        config = compose_unchecked("grpo_code", given)
        said = "; ".join([*check_functions(config.reward), *problems(config)])
    except ConfigError as error:
        said = str(error)
    assert case["said"] in said
    assert bool(case["said"]) == bool(said)
