"""The time limit of a group follows the length of its samples and the rate of the engine."""

from async_rl.config.timeouts import TimeoutsConfig
from async_rl.rollouts.groups import Pace

LIMITS = TimeoutsConfig(call_s=10, start_s=180, group_s=120)


def test_a_long_answer_has_time_before_any_rate_is_known() -> None:
    # 16,384 tokens at 60 tokens/s take 273 s.
    assert Pace(LIMITS, max_tokens=16_384).limit_s > 273
    assert Pace(LIMITS, max_tokens=64).limit_s == 120


def test_the_limit_follows_the_slowest_of_the_last_groups() -> None:
    pace = Pace(LIMITS, max_tokens=16_384)
    pace.note(6_000, 100.0)
    pace.note(3_000, 100.0)
    assert pace.limit_s == 3 * 16_384 / 30
    for _ in range(32):
        pace.note(6_000, 100.0)
    assert pace.limit_s == 3 * 16_384 / 60


def test_the_limit_stays_between_group_s_and_the_time_that_the_buffer_waits() -> None:
    pace = Pace(LIMITS, max_tokens=2_400)
    pace.note(2_400, 1.0)
    assert pace.limit_s == 120
    pace.note(1, 1_000.0)
    assert pace.limit_s == LIMITS.longest_group_s(2_400) == 240


def test_an_empty_group_says_nothing_about_the_rate() -> None:
    pace = Pace(LIMITS, max_tokens=2_400)
    pace.note(0, 5.0)
    assert pace.limit_s == 240
