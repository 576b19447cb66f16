"""A run in virtual time: the product's own admission and replay, fed with recorded times.

Generators share their speed among the groups in flight; samples wait for a place of the scorer; the
learner takes a batch, trains for the recorded time and commits; weights arrive after the recorded
push. Not simulated: processes that
compete for cores, failures, the draining of generators that leave.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from async_rl.buffer.admission import Admission, Gate
from async_rl.buffer.groups import OpenGroup, StoredGroup
from async_rl.buffer.replay import Replay
from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.core.types import Purpose
from async_rl.runs.forecast.engine import Engine, Marks
from async_rl.runs.forecast.recorded import Recorded, Work
from async_rl.runs.forecast.scoring import Places, setting_of
from async_rl.runs.forecast.variants import changed_works

_PURPOSES = (Purpose.EVAL, Purpose.TRAIN)


@frozen
class Scenario:
    """The values that may differ from the recorded run. *_speed: 1 is the recorded speed.
    group_size, max_response_tokens: 0 is as recorded. places: the setting that limits the samples
    scored at once in a verifier; 0 is no limit.
    """

    generators: int
    slots: int
    groups_per_step: int
    max_staleness_versions: int
    push_every_steps: int
    evaluate_every_steps: int
    num_steps: int
    group_size: int = 0
    max_response_tokens: int = 0
    learner_speed: float = 1.0
    scoring_speed: float = 1.0
    generation_speed: float = 1.0
    verifiers: int = 1
    places: int = 0


@frozen
class Forecast:
    """steps_per_s: after the warm-up steps; 0 if the run would stop. Shares of time: the
    learner waits for a batch; a generator has no group in flight. age: mean versions of the oldest
    token of a trained group.
    """

    steps_per_s: float
    learner_waits: float
    generators_idle: float
    age: float
    places: int = 0
    scores_wait_s: float = 0.0


def scenario_of(config: RunConfig, recorded: Recorded) -> Scenario:
    """Return the scenario of the recorded run itself."""
    return Scenario(
        generators=recorded.num_generators,
        slots=config.generation.max_concurrent_groups,
        groups_per_step=config.buffer.groups_per_step,
        max_staleness_versions=config.buffer.max_staleness_versions,
        push_every_steps=config.weights.push_every_steps,
        evaluate_every_steps=config.evaluation.every_steps if recorded.evaluation else 0,
        num_steps=len(recorded.step_s),
        verifiers=config.verifiers.count,
        places=setting_of(config)[1],
    )


def simulate(scenario: Scenario, recorded: Recorded) -> Forecast:
    """Simulate a run to its last step."""
    return _Run(scenario, recorded).run()


class _Run:
    def __init__(self, scenario: Scenario, recorded: Recorded) -> None:
        self._scenario, self._recorded = scenario, recorded
        self._replay = Replay(
            groups_per_step=scenario.groups_per_step,
            max_staleness_versions=scenario.max_staleness_versions,
            age_rule="drop",
        )
        gate = Gate(
            groups_per_step=scenario.groups_per_step,
            max_staleness_versions=scenario.max_staleness_versions,
            num_steps=scenario.num_steps,
        )
        self._admission = Admission(gate, self._replay, max_attempts=1)
        self._engines = [Engine(index, recorded.beside) for index in range(scenario.generators)]
        self._free = [(0, index) for index in range(scenario.generators)]
        self._num_prompts = _num_prompts(recorded, scenario)
        works = changed_works(recorded.train, scenario)
        self._places = Places(_num_places(scenario, recorded, works, self._num_prompts))
        self._works = {
            purpose: [(work, _marks(work, self._places.number)) for work in those]
            for purpose, those in ((Purpose.TRAIN, works), (Purpose.EVAL, recorded.evaluation))
        }
        self._trains, self._waits_since, self._waited_s = False, 0.0, 0.0
        self._ages: list[int] = []
        self._committed_s: list[float] = []
        self._now_s = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scored_s: dict[int, float] = {}
        self._used = {purpose: 0 for purpose in Purpose}

    def run(self) -> Forecast:
        self._feed()
        while self._queue and len(self._committed_s) < self._scenario.num_steps:
            self._now_s, _, event = heapq.heappop(self._queue)
            event()
        return self._forecast()

    def _forecast(self) -> Forecast:
        if len(self._committed_s) < self._scenario.num_steps:
            # Admission waits for weights that are never pushed, as in push_every_steps=2 at age 0.
            return Forecast(steps_per_s=0.0, learner_waits=1.0, generators_idle=1.0, age=0.0)
        warm = min(self._recorded.num_warm, len(self._committed_s) - 1)
        span_s = self._committed_s[-1] - self._committed_s[warm - 1]
        for engine in self._engines:
            engine.advance(self._now_s)
        idle_s = float(np.mean([engine.idle_s for engine in self._engines]))
        return Forecast(
            steps_per_s=(len(self._committed_s) - warm) / span_s,
            learner_waits=self._waited_s / self._now_s,
            generators_idle=idle_s / self._now_s,
            age=float(np.mean(self._ages)),
            places=self._places.number,
            scores_wait_s=self._places.waited_s / max(self._places.num_scored, 1),
        )

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._now_s + seconds, next(self._order), event))

    def _feed(self) -> None:
        """Hand out groups while admission allows it, to the generator with the fewest first."""
        # All generators have the same weights, so what is refused to one is refused to all.
        while self._free:
            num_groups, index = self._free[0]
            engine = self._engines[index]
            if num_groups != engine.num_groups:
                heapq.heappop(self._free)  # its number changed, and a newer entry has it
                continue
            if not self._hand_out(engine):
                return
            heapq.heappop(self._free)
            self._list_free(index)

    def _list_free(self, index: int) -> None:
        """Note that this generator may have room."""
        num_groups = self._engines[index].num_groups
        if num_groups < self._scenario.slots:
            heapq.heappush(self._free, (num_groups, index))

    def _hand_out(self, engine: Engine) -> bool:
        for purpose in _PURPOSES:
            if purpose is Purpose.EVAL and self._admission.waiting_evaluation() is None:
                continue
            group = self._admission.hand_out(
                purpose,
                generator=engine.name,
                incarnation="",
                version=engine.version,
                now_s=self._now_s,
            )
            if group is not None:
                work, marks = self._work(purpose)
                engine.start(self._now_s, group, work, marks, self._scenario.generation_speed)
                self._expect(engine)
                return True
        return False

    def _work(self, purpose: Purpose) -> tuple[Work, Marks]:
        """Return the next recorded work of this purpose, from the beginning after the last."""
        works = self._works[purpose]
        index = self._used[purpose] % len(works)
        self._used[purpose] += 1
        return works[index]

    def _expect(self, engine: Engine) -> None:
        """Plan the end of the engine's next sample; an earlier plan is void."""
        engine.events += 1
        number, next_s = engine.events, engine.next_s
        if next_s is not None:
            self._after(next_s, lambda: self._complete(engine, number))

    def _complete(self, engine: Engine, number: int) -> None:
        if number != engine.events:
            return
        engine.advance(self._now_s)
        group, work, seconds, is_last = engine.next_sample()
        scored_s = self._places.end_s(self._now_s, seconds / self._scenario.scoring_speed)
        scored_s = max(scored_s, self._scored_s.pop(group.group_id, 0.0))
        self._expect(engine)
        if not is_last:
            self._scored_s[group.group_id] = scored_s
        else:
            newest, stored_s = engine.version, scored_s + work.storing_s
            self._after(stored_s - self._now_s, lambda: self._put(group, newest))
            self._list_free(engine.index)
            self._feed()

    def _put(self, group: OpenGroup, newest: int) -> None:
        self._admission.close(group.group_id)
        if group.purpose is Purpose.TRAIN:
            stored = StoredGroup(
                group_id=group.group_id, oldest_version=group.version, newest_version=newest
            )
            self._replay.put(stored)
            self._take()
        self._feed()

    def _take(self) -> None:
        """Train the next batch if the learner is free and there is one."""
        version = self._replay.learner_version
        if self._trains or version >= self._scenario.num_steps:
            return
        take = self._replay.take(version, self._admission.training())
        if take.group_ids:
            self._trains = True
            self._waited_s += self._now_s - self._waits_since
            lease = self._replay.leases[version]
            self._ages.append(version - min(group.oldest_version for group in lease))
            step_s = self._recorded.step_s[version % len(self._recorded.step_s)]
            self._after(
                step_s / self._scenario.learner_speed, lambda: self._commit(list(take.group_ids))
            )

    def _commit(self, group_ids: list[int]) -> None:
        scenario, version = self._scenario, self._replay.learner_version + 1
        self._replay.commit(version, group_ids)
        self._committed_s.append(self._now_s)
        self._trains, self._waits_since = False, self._now_s
        if version % scenario.push_every_steps == 0 or version == scenario.num_steps:
            self._after(self._recorded.push_s, lambda: self._push(version))
        every = scenario.evaluate_every_steps
        if every and version % every == 0 and self._num_prompts:
            self._admission.start_evaluation(version, self._num_prompts)
        self._take()
        self._feed()

    def _push(self, version: int) -> None:
        for engine in self._engines:
            engine.version = max(engine.version, version)
        self._feed()


def _num_prompts(recorded: Recorded, scenario: Scenario) -> int:
    """Return the groups of one evaluation."""
    if not scenario.evaluate_every_steps:
        return 0
    first = 1 if recorded.first_step == 1 else 0  # of the start model
    num_evaluations = first + scenario.num_steps // scenario.evaluate_every_steps
    return round(len(recorded.evaluation) / max(num_evaluations, 1))


def _num_places(
    scenario: Scenario, recorded: Recorded, works: Sequence[Work], num_prompts: int
) -> int:
    """Return the places of all verifiers, 0 if no sample can ever wait for one."""
    limits = [scenario.places * recorded.places_per_unit, recorded.seen_places]
    number = math.ceil(scenario.verifiers * min(filter(None, limits), default=0))
    most_groups = (scenario.max_staleness_versions + 1) * scenario.groups_per_step + num_prompts
    return number if number < most_groups * max(len(work.scores) for work in works) else 0


def _marks(work: Work, num_places: int) -> Marks:
    """Return the ends of samples, the first one last; one end of all where none can wait."""
    if not num_places:
        return [(1.0, work.scoring_s)]
    ends = np.array(work.lengths) / max(work.lengths)
    shares = (work.first + (1 - work.first) * ends).tolist()
    return sorted(zip(shares, work.scores, strict=True), reverse=True)
