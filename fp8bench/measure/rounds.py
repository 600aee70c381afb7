"""Times the arms of a group in rounds until their comparison is decided, and replays captured steps.

A round times one slot of every arm, in a random and balanced order. The reference takes part twice, with separate
tensors. Its second copy, the control, gives every group an A/A comparison (of two equal arms). An arm leaves the
rounds when its comparison is decided. Emulated arms get a few fixed rounds, because their time is not a speed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fp8bench.errors import WorkerError
from fp8bench.measure.arm import ActivityCallback, ArmFailed, MeasuredArm, QuantiserCompilation, raise_as_arm_failure
from fp8bench.measure.handle import Worker
from fp8bench.measure.slots import choose_slot_filling, sum_by_phase
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, FreshRounds, ReplayTimes, Segments, SlotSample, Timing
from fp8bench.model.stopping import EMULATED_ROUNDS, MIN_RETIMING_CANDIDATES, StoppingRule
from fp8bench.protocols.axes import ROTATING
from fp8bench.registry import workloads

T = TypeVar("T")


class RoundOrders(Generic[T]):
    """Generates the order of the arms in each round. A block has as many rounds as there are arms, and in a block each
    arm takes each position once.

    When the set of arms changes, the rest of the block is dropped and a new block begins. So an arm that leaves
    unbalances the orders by one round at most.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._arms: list[T] = []
        self._remaining_orders: list[list[int]] = []

    def draw_round_order(self, arms: Sequence[T]) -> list[T]:
        if not arms:  # no arm is left if all arms have failed, or if no phase could be replayed
            return []
        if not self._remaining_orders or self._arms != list(arms):
            self._arms = list(arms)
            self._remaining_orders = self._make_arm_orders(len(arms))
        return [arms[place] for place in self._remaining_orders.pop()]

    def _make_arm_orders(self, count: int) -> list[list[int]]:
        """Returns orders of the arms, shuffled, in which each arm follows each other arm equally often: the rows of a
        Williams square, with the arms assigned to its numbers at random.
        """
        shuffled_arm_numbers = list(range(count))
        self._draw.shuffle(shuffled_arm_numbers)
        # Row r is the zigzag 0, 1, -1, 2, -2, ... plus r, modulo the number of arms. All steps of a zigzag differ. So
        # with an even number of arms, each arm follows each other arm exactly once. With an odd number this is
        # impossible: the mirrored rows are added, and each arm follows each other arm twice.
        zigzag_offsets = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
        rows = [[shuffled_arm_numbers[(start + step) % count] for step in zigzag_offsets] for start in range(count)]
        mirrored_rows = [row[::-1] for row in rows] if count % 2 else []
        for square in (rows, mirrored_rows):
            self._draw.shuffle(square)
        return [*mirrored_rows, *rows]


# The arms of steps shorter than this many seconds discard their first call. Refilling a cache of some megabytes takes
# a fraction of a millisecond, which is negligible in longer steps.
MAX_DISCARD_STEP_SECONDS = 100e-3

# A function that returns whether the comparison is decided, from the timings of a candidate, the reference and the
# control.
IsComparisonDecided = Callable[[Timing, Timing, Timing | None], bool]
# A function that returns the index of the fastest candidate, from the timings of the candidates, the reference and the
# control. None if no candidate is faster.
ChooseFastest = Callable[[Sequence[Timing], Timing, Timing | None], int | None]


@dataclass
class RoundSession:
    """Arms whose states are in memory at the same time, and which are timed in common rounds.

    `reference` and `control` are None if memory did not suffice for them.
    """

    reference: MeasuredArm | None
    control: MeasuredArm | None
    candidates: list[MeasuredArm]

    @property
    def arms(self) -> list[MeasuredArm]:
        return [arm for arm in (self.reference, self.control, *self.candidates) if arm is not None]

    def prepare(
        self, worker: Worker, quantisers: QuantiserCompilation | None = None, tell: ActivityCallback | None = None
    ) -> None:
        """Prepares all arms. For a fair comparison, their steps are divided into comparable cells (timed parts), and
        either all arms with short steps discard their first call of a slot, or none.
        """
        for arm in self.arms:
            with raise_as_arm_failure(arm):
                arm.prepare(worker, quantisers, tell)
        for arm in self.arms:
            with raise_as_arm_failure(arm):
                arm.prepare_state_copies(worker)
        leading_arm = self.arms[0]
        for arm in self.arms[1:]:
            arm.match_cells(leading_arm)
        # The first call of a slot finds cold caches, and the second call warm caches. So if any arm has several calls
        # in a slot, all arms with short steps discard their first call.
        if any(arm.calls > 1 for arm in self.arms if not arm.is_emulated):
            for arm in self.arms:
                if arm.step_seconds < MAX_DISCARD_STEP_SECONDS:
                    arm.untimed_call_count = 1

    def check_states(self, worker: Worker) -> None:
        for arm in self.arms:
            with raise_as_arm_failure(arm):
                arm.check_states(worker)

    def release_states(self, worker: Worker) -> ArmFailed | None:
        release_failures = [failed for arm in self.arms if (failed := arm.release_states(worker))]
        return release_failures[0] if release_failures else None

    def run(
        self,
        worker: Worker,
        rule: StoppingRule,
        judge: IsComparisonDecided,
        seed: int,
        report_progress: Callable[[MeasuredArm, float], None],
        clock: Callable[[], float] = time.monotonic,
        after: Callable[[MeasuredArm], None] | None = None,
    ) -> str:
        """Times rounds until the comparison of every candidate is decided, or the rule ends the timing. Returns the
        reason why the rounds ended.

        `after` is called with each arm after its slot.
        """
        random_round_orders: RoundOrders[MeasuredArm] = RoundOrders(random.Random(seed))
        started_at = clock()
        rounds, emulated_seconds = 0, 0.0
        undecided_arms = self._list_compared_arms()
        # A round times every undecided arm once, so that drift affects all of them alike.
        while True:
            current_round_arms = self._select_round_arms(rounds, undecided_arms, rule)
            if not current_round_arms:
                return f"answered after {rounds} rounds"
            for position, arm in enumerate(random_round_orders.draw_round_order(current_round_arms)):
                report_progress(arm, self._estimate_progress(rounds, clock() - started_at - emulated_seconds, rule))
                with raise_as_arm_failure(arm):
                    arm.run(worker, rounds, position)
                # The rule does not count the time of emulated steps, which are slow and give no information about
                # speed.
                if arm.is_emulated:
                    emulated_seconds += arm.slots[-1].wall_seconds
                if after is not None:
                    after(arm)
            rounds += 1
            # Judging after every round would find a chance difference sooner or later, so the rule judges after a few
            # rounds only.
            if rule.looks(rounds):
                undecided_arms = [arm for arm in undecided_arms if not self._is_comparison_decided(arm, judge)]
            end_reason = rule.reason_to_end(rounds, clock() - started_at, emulated_seconds)
            if end_reason:
                return end_reason

    def time_fastest_again(
        self,
        choose: ChooseFastest,
        worker: Worker,
        rule: StoppingRule,
        seed: int,
        report_progress: Callable[[MeasuredArm, float], None],
        after: Callable[[MeasuredArm], None] | None,
    ) -> tuple[MeasuredArm, FreshRounds] | None:
        """Times the fastest candidate again, together with the reference and its control, in as many new rounds as
        before. The earlier samples of this candidate are biased: among equal candidates, noise decides which is the
        fastest.
        """
        candidates = [arm for arm in self.candidates if not arm.is_emulated]
        reference, control = self.reference, self.control
        if reference is None or reference.is_emulated or len(candidates) < MIN_RETIMING_CANDIDATES:
            return None
        fastest_arm_index = choose(
            [arm.timing() for arm in candidates], reference.timing(), control.timing() if control is not None else None
        )
        if fastest_arm_index is None:
            return None
        fastest_arm = candidates[fastest_arm_index]
        # Use only new samples, because the samples that led to the choice are biased.
        reference, repeated_arm = replace(reference, slots=[]), replace(fastest_arm, slots=[])
        control = replace(control, slots=[]) if control is not None else None
        fixed_rounds_rule = StoppingRule(fixed=len(fastest_arm.slots), ceiling=rule.ceiling)
        # The rule has a fixed number of rounds, so it never calls the judge.
        RoundSession(reference, control, [repeated_arm]).run(
            worker, fixed_rounds_rule, lambda *timings: False, seed, report_progress, after=after
        )
        repeated_control_timing = control.timing() if control is not None else None
        return fastest_arm, FreshRounds(
            repeated_arm.timing(), reference.timing(), repeated_control_timing, len(candidates)
        )

    def _list_compared_arms(self) -> list[MeasuredArm]:
        """Returns the arms whose comparison with the reference decides when rounds end. These arms are the native
        candidates, or the control if no candidate is native. Returns [] if the reference is missing or emulated.
        """
        if self.reference is None or self.reference.is_emulated:
            return []
        native_candidate_arms = [arm for arm in self.candidates if not arm.is_emulated]
        return native_candidate_arms or [arm for arm in (self.control,) if arm is not None]

    def _select_round_arms(
        self, rounds: int, undecided_arms: Sequence[MeasuredArm], rule: StoppingRule
    ) -> list[MeasuredArm]:
        emulated_arms = [arm for arm in self.arms if arm.is_emulated and rounds < EMULATED_ROUNDS]
        non_emulated_arms = [arm for arm in self.arms if not arm.is_emulated]
        if rule.fixed is not None:
            return non_emulated_arms + emulated_arms
        if undecided_arms:
            return [
                arm for arm in non_emulated_arms if arm in (self.reference, self.control) or arm in undecided_arms
            ] + emulated_arms
        # If nothing is compared, native arms get a fixed number of rounds. This happens to an arm that is alone in
        # memory, and with an emulated reference.
        has_fixed_rounds = not self._list_compared_arms() and rounds < 2 * rule.least
        return (non_emulated_arms if has_fixed_rounds else []) + emulated_arms

    def _is_comparison_decided(self, arm: MeasuredArm, judge: IsComparisonDecided) -> bool:
        if self.reference is None:
            return False
        control = self.control.timing() if self.control is not None and arm is not self.control else None
        return judge(arm.timing(), self.reference.timing(), control)

    @staticmethod
    def _estimate_progress(rounds: int, seconds: float, rule: StoppingRule) -> float:
        if rule.fixed is not None:
            return rounds / rule.fixed
        return min(1.0, seconds / rule.budget, rounds / rule.least) if rule.budget > 0 else 1.0


REPLAY_ROUNDS = 10
# The host takes 10 to 20 us to launch a captured step. This is the larger value, in seconds.
_MAX_REPLAY_LAUNCH_SECONDS = 20e-6
# The number of discarded replays in a slot: the first replay finds the data of the previous arm in the caches.
_DISCARDED_REPLAYS = 1


@dataclass(frozen=True)
class StepReplayPass:
    """Times the device without the host. The worker captures a step of each case, and replays the captured step with
    one launch per step.

    This pass runs last, because a failed capture may damage the states. Cases alternate as they do in rounds.
    """

    _random_seed: int
    _report_progress: Callable[[MeasuredArm, float], None]

    def measure(self, arms: Sequence[MeasuredArm], worker: Worker) -> dict[str, ReplayTimes]:
        # If a step cannot be captured, store the reason. The other steps are replayed in rounds.
        reasons = {arm.key: self._capture_arm_step(arm, worker) for arm in arms}
        arms_with_captured_step = [arm for arm in arms if not reasons[arm.key]]
        slots: dict[str, list[SlotSample]] = {arm.key: [] for arm in arms_with_captured_step}
        random_round_orders: RoundOrders[MeasuredArm] = RoundOrders(random.Random(self._random_seed))
        for round_number in range(REPLAY_ROUNDS if arms_with_captured_step else 0):
            for position, arm in enumerate(random_round_orders.draw_round_order(arms_with_captured_step)):
                self._report_progress(arm, round_number / REPLAY_ROUNDS)
                try:
                    slots[arm.key].append(_time_replays(arm, worker, round_number, position))
                # If the worker is lost, all captured steps are lost as well, so no replay can continue.
                except WorkerError as cause:
                    worker.restart()
                    error_text = f"an error of {arm.planned.case.mode} ended the replays: {cause}"
                    return {key: ReplayTimes(why=why or error_text) for key, why in reasons.items()}
        # If a replay damaged its state, store the reason instead of a time.
        replays = {arm.key: self._check_replays(arm, worker, slots[arm.key]) for arm in arms_with_captured_step}
        # Times of phases need a second capture, with marks. If this capture fails, only these times are missing.
        has_capture_failed = len(arms_with_captured_step) < len(arms)
        for arm in arms_with_captured_step:
            if replays[arm.key].timing is not None:
                try:
                    replays[arm.key] = replace(replays[arm.key], phases=self._time_phases(arm, worker))
                except WorkerError:
                    has_capture_failed = True
                    break
        if has_capture_failed:
            worker.restart()  # a failed capture may have damaged the process
        return {arm.key: replays.get(arm.key) or ReplayTimes(why=reasons[arm.key]) for arm in arms}

    def _capture_arm_step(self, arm: MeasuredArm, worker: Worker) -> str:
        self._report_progress(arm, 0.0)
        static_scales = arm.planned.case.static
        if arm.cache_mode == ROTATING and _name_data_loaded_by_host(arm):
            loaded_data = _name_data_loaded_by_host(arm)
            return f"its states rotate, and {loaded_data} would have to be loaded between the steps of a replay"
        if static_scales is not None and static_scales.refresh:
            return "its scales are renewed after a number of steps, which only the host counts"
        try:
            return str(worker.with_time_limit(arm.limits.for_first_step(arm.planned.work)).capture(arm.key))
        except WorkerError as cause:
            worker.restart()
            return f"capturing a step failed: {cause}"

    def _time_phases(self, arm: MeasuredArm, worker: Worker) -> tuple[tuple[str, float], ...]:
        """Returns the seconds of each phase in the fastest replay of a captured step, as pairs (phase, seconds).
        Returns () if the device cannot mark phases in a replay, or if the case rotates through several states.
        """
        fastest_step = None
        if arm.cache_mode != ROTATING:
            fastest_step = worker.with_time_limit(arm.limits.for_first_step(arm.planned.work)).replay_phases(arm.key)
        if fastest_step is None:
            return ()
        phase_totals_ns = zip(CELL_PHASES, sum_by_phase(fastest_step.codes, fastest_step.intervals_ns), strict=True)
        return tuple((phase, nanoseconds * 1e-9) for phase, nanoseconds in phase_totals_ns if nanoseconds)

    def _check_replays(self, arm: MeasuredArm, worker: Worker, slots: Sequence[SlotSample]) -> ReplayTimes:
        try:
            state_fault = worker.with_time_limit(arm.limits.for_untimed_pass(arm.planned.work)).check(arm.key).wrong
        except WorkerError as cause:
            state_fault = str(cause)
        if state_fault:
            return ReplayTimes(why=f"after replays: {state_fault}")
        return ReplayTimes(Timing(Segments((UNATTRIBUTED,), (0,)), tuple(slots)), loaded=_name_data_loaded_by_host(arm))


def _name_data_loaded_by_host(arm: MeasuredArm) -> str:
    return workloads.get(arm.planned.case.workload).loads


def _time_replays(arm: MeasuredArm, worker: Worker, round_number: int, position: int) -> SlotSample:
    time_limit = arm.limits.for_slot(arm.step_seconds, arm.calls + _DISCARDED_REPLAYS)
    # If the host loads data between calls, it may fall behind, so the device is kept busy before each call
    # separately.
    queue_filling = choose_slot_filling(_MAX_REPLAY_LAUNCH_SECONDS, 1 if _name_data_loaded_by_host(arm) else arm.calls)
    slot = worker.with_time_limit(time_limit).replay(arm.key, arm.calls, _DISCARDED_REPLAYS, queue_filling)
    calls_ns = tuple((sum(step.intervals_ns),) for step in slot.steps)
    return SlotSample(round_number, calls_ns, slot.wall_seconds, slot.cpu_seconds, slot.host_seconds, place=position)
