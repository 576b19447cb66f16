"""A run in virtual time: the product's own admission and replay, fed with recorded times.

Generators share their speed among the groups in flight; samples wait for a place of the scorer; the
learner takes a batch, trains for the recorded time and commits; weights arrive after the recorded
push. Not simulated: processes that compete for cores, failures, the draining of generators that
leave.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from async_rl.buffer.admission import Admission
from async_rl.buffer.groups import OpenGroup, StoredGroup
from async_rl.buffer.replay import Replay
from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.core.types import Purpose
from async_rl.planning.estimate import max_groups_in_flight
from async_rl.runs.forecast.generator import Generator, Marks
from async_rl.runs.forecast.recorded import Recorded, Work
from async_rl.runs.forecast.scenario import Scenario, changed_works
from async_rl.runs.forecast.scoring import Places, setting_of

# A generator requests evaluations first, as in the run.
_PURPOSES = (Purpose.EVAL, Purpose.TRAIN)


@frozen
class Forecast:
    """The result of a simulated run.

    steps_per_s: after the warm-up steps; 0 if the run would stop. learner_waits: share of time in
    which the learner waits for a batch. generators_idle: share of time without a group in flight.
    age: mean versions of the oldest token of a trained group. places: of all verifiers, 0 if no
    sample can wait for one. scores_wait_s: mean wait of a sample for a place.
    """

    steps_per_s: float
    learner_waits: float
    generators_idle: float
    age: float
    places: int = 0
    scores_wait_s: float = 0.0


def simulate(scenario: Scenario, recorded: Recorded) -> Forecast:
    """Simulate a run to its last step."""
    return _Run(scenario, recorded).run()


class _Run:
    def __init__(self, scenario: Scenario, recorded: Recorded) -> None:
        self._scenario = scenario
        config = scenario.config
        self._config = config
        self._recorded = recorded
        self._now_s = 0.0
        # Equal times are taken in the order of planning, so that a forecast repeats.
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._is_training = False
        self._waits_since_s = 0.0
        self._waited_s = 0.0
        self._committed_s: list[float] = []
        self._ages: list[int] = []
        self._replay = Replay(config)
        self._opening_s = math.inf
        self._admission = Admission(config, self._replay)
        self._generators = [Generator(i, recorded.beside) for i in range(config.generators.count)]
        # A heap of (samples in flight, index): the generator with the fewest is served next.
        # Searching 512 generators for each group would make a sweep take minutes.
        self._with_room = [(0, generator.index) for generator in self._generators]
        train = changed_works(recorded, scenario.chosen)
        self._places = Places(_num_places(config, recorded, train))
        # The recorded work repeats if the simulated run needs more of it.
        self._works = {
            Purpose.TRAIN: itertools.cycle(train),
            Purpose.EVAL: itertools.cycle(recorded.evaluation),
        }

    def run(self) -> Forecast:
        """Run until the last step, or until nothing can happen any more."""
        self._hand_out_groups()
        while len(self._committed_s) < self._config.num_steps:
            if not self._events:
                # Admission waits for weights that are never pushed, for example with
                # push_every_steps=2 and a staleness bound of 0.
                return Forecast(steps_per_s=0.0, learner_waits=1.0, generators_idle=1.0, age=0.0)
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        now_s = self._now_s
        committed_s = self._committed_s
        warm = min(self._recorded.num_warm, len(committed_s) - 1)
        for generator in self._generators:
            generator.advance(now_s)
        idle_s = float(np.mean([generator.idle_s for generator in self._generators]))
        return Forecast(
            steps_per_s=(len(committed_s) - warm) / (committed_s[-1] - committed_s[warm - 1]),
            learner_waits=self._waited_s / now_s,
            generators_idle=idle_s / now_s,
            age=float(np.mean(self._ages)),
            places=self._places.number,
            scores_wait_s=self._places.waited_s / max(self._places.num_scored, 1),
        )

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + seconds, next(self._order), event))

    def _hand_out_groups(self) -> None:
        """Hand out groups while admission allows it, to the generator with the fewest samples."""
        # All generators have the same weights, so a group refused to one is refused to all.
        while self._with_room:
            num_samples, index = self._with_room[0]
            generator = self._generators[index]
            if num_samples == generator.num_samples:
                if not self._hand_out(generator):
                    break
                heapq.heappop(self._with_room)
                self._note_room(generator)
            else:
                heapq.heappop(self._with_room)  # outdated: a newer entry has the present number
        now_s = self._now_s
        opens_s = self._admission.opens_s(now_s)
        if opens_s not in (math.inf, self._opening_s):
            self._opening_s = opens_s
            self._after(opens_s - now_s, self._hand_out_groups)

    def _note_room(self, generator: Generator) -> None:
        # As in a generator, small groups of an evaluation take the room of their samples.
        generation = self._config.generation
        num_groups = math.ceil(generator.num_samples / generation.num_drawn)
        if num_groups < generation.max_concurrent_groups:
            heapq.heappush(self._with_room, (generator.num_samples, generator.index))

    def _hand_out(self, generator: Generator) -> bool:
        for purpose in _PURPOSES:
            if purpose is Purpose.EVAL and self._admission.waiting_evaluation() is None:
                continue
            group = self._admission.hand_out(
                purpose,
                generator=generator.name,
                incarnation="",
                version=generator.version,
                now_s=self._now_s,
            )
            if group is not None:
                work = next(self._works[purpose])
                num_samples = self._config.generation.num_drawn
                if purpose is Purpose.EVAL:
                    num_samples = len(work.lengths)
                generator.start(
                    self._now_s,
                    group,
                    work,
                    marks=_marks(work, self._places.number),
                    num_samples=num_samples,
                    speed=self._scenario.chosen.get("generation_speed", 1.0),
                )
                self._plan_next_end(generator)
                return True
        return False

    def _plan_next_end(self, generator: Generator) -> None:
        # A group that was added slows the other groups down, so the earlier plan is void.
        generator.plans += 1
        plan = generator.plans
        next_end_s = generator.next_end_s
        if next_end_s is not None:
            self._after(next_end_s, lambda: self._end_sample(generator, plan))

    def _end_sample(self, generator: Generator, plan: int) -> None:
        if plan != generator.plans:
            return
        now_s = self._now_s
        generator.advance(now_s)
        flight, score_s = generator.end_sample()
        scoring_speed = self._scenario.chosen.get("scoring_speed", 1.0)
        scored_s = self._places.end_s(now_s, score_s / scoring_speed)
        flight.scored_s = max(flight.scored_s, scored_s)
        self._plan_next_end(generator)
        if not flight.ends:
            newest = generator.version
            stored_s = flight.scored_s + flight.work.storing_s
            self._after(stored_s - now_s, lambda: self._store(flight.group, newest))
            self._note_room(generator)
            self._hand_out_groups()

    def _store(self, group: OpenGroup, newest_version: int) -> None:
        self._admission.close(group.group_id)
        if group.purpose is Purpose.TRAIN:
            self._replay.put(
                StoredGroup(
                    group_id=group.group_id,
                    oldest_version=group.version,
                    newest_version=newest_version,
                    issued_s=group.issued_s,
                    ready_s=self._now_s,
                )
            )
            self._train()
        self._hand_out_groups()

    def _train(self) -> None:
        """Train the next batch if the learner is free and the batch is complete."""
        version = self._replay.learner_version
        if self._is_training or version >= self._config.num_steps:
            return
        now_s = self._now_s
        taken = self._replay.take(version, self._admission.training(), now_s=now_s)
        group_ids = [*taken.group_ids, *taken.reused]
        if taken.group_ids:
            self._is_training = True
            self._waited_s += now_s - self._waits_since_s
            oldest = min(group.oldest_version for group in self._replay.leases[version])
            self._ages.append(version - oldest)
            step_s = self._recorded.step_s[version % len(self._recorded.step_s)]
            self._after(step_s / self._scenario.learner_speed, lambda: self._commit(group_ids))

    def _commit(self, group_ids: list[int]) -> None:
        config = self._config
        version = self._replay.learner_version + 1
        self._replay.commit(version, group_ids, now_s=self._now_s)
        self._committed_s.append(self._now_s)
        self._is_training = False
        self._waits_since_s = self._now_s
        if version % config.weights.push_every_steps == 0 or version == config.num_steps:
            self._after(self._recorded.push_s, lambda: self._receive_weights(version))
        every = config.evaluation.every_steps
        num_eval_groups = self._recorded.num_eval_groups
        if every and version % every == 0 and num_eval_groups:
            self._admission.start_evaluation(version, num_eval_groups)
        self._train()
        self._hand_out_groups()

    def _receive_weights(self, version: int) -> None:
        for generator in self._generators:
            generator.version = max(generator.version, version)
        self._hand_out_groups()


def _num_places(config: RunConfig, recorded: Recorded, works: Sequence[Work]) -> int:
    """Return the places of all verifiers, 0 if no sample can ever wait for one."""
    number = config.verifiers.count * setting_of(config)[1] * recorded.places_per_unit
    most_groups = max_groups_in_flight(config)
    if config.evaluation.every_steps:
        most_groups += recorded.num_eval_groups
    most_samples = most_groups * max(len(work.scores) for work in works)
    return number if number < most_samples else 0


def _marks(work: Work, num_places: int) -> Marks:
    """Return the ends of samples; a single end for all samples where none can wait for a place."""
    if not num_places:
        return [(1.0, work.scoring_s)]
    ends = np.array(work.lengths) / max(work.lengths)
    shares = (work.first + (1 - work.first) * ends).tolist()
    return sorted(zip(shares, work.scores, strict=True), reverse=True)
