"""Memory of a watched loop: batches, modes, moments, and weights on other ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F

import fp8bench
from fp8bench.features.train.lab.batch_figures import BatchHistory
from fp8bench.features.train.lab.loop_state import LoopState
from fp8bench.features.train.lab.replicas import ReplicaWeightCheck, digest_weight_bits
from fp8bench.features.train.values import MOMENTS_GONE, StepFigure, StreamLine


def test_batches_are_compared_with_the_last_hundred() -> None:
    """Expected is counted from a list of batch numbers, with batches that come back after up to 130 steps."""
    numbers = [*range(20), *random.Random(0).choices(range(130), k=300), 7, 7, 7]
    memory, new, cycled, again, period = BatchHistory(), 0, 0, 0, 0
    for step, number in enumerate(numbers):
        memory.add_inputs((torch.full((4, 3), float(number)),))
        earlier = numbers[max(0, step - 100) : step][::-1]
        age = earlier.index(number) + 1 if number in earlier else 0
        new, cycled, again = new + (not age), cycled + 1 if age else 0, again + 1 if age == 1 else 0
        period = max(period, age) if age else 0
        figures = {name: float(value) for (name, _), value in memory.list_figures().items()}
        expected = {"inputs_new": new, "inputs_cycled": cycled, "inputs_again": again, "inputs_period": period}
        assert figures == {**expected, "condition_again": 0.0, "examples": 4.0}
    assert again == 2


def count_conditions(times: list[list[int]], fixed_inputs: bool = False) -> list[float]:
    memory = BatchHistory()
    counts = []
    for step, time in enumerate(times):
        memory.add_inputs((torch.full((4, 5), float(not fixed_inputs and step)), torch.tensor(time)))
        counts.append(float(memory.list_figures()["condition_again", ""]))
    return counts


def test_a_condition_that_stays_is_counted_while_inputs_change() -> None:
    changes, stays = [[9, 2, 3, 3], [3, 9, 1, 2]], [[2, 7, 7, 9]] * 4
    assert count_conditions(changes + stays) == [0, 0, 0, 1, 2, 3]
    assert count_conditions(stays) == [0, 1, 2, 3]
    assert count_conditions(changes + stays, fixed_inputs=True) == [0, 0, 0, 0, 0, 0]
    # Lengths of sequences, masks and a guidance of 1 raise no alarm.
    assert count_conditions([[5, 5, 5, 5]] * 4) == count_conditions([[1, 1, 1, 1]] * 4) == [0, 0, 0, 0]


def test_targets_that_stay_are_counted_while_inputs_change() -> None:
    noise, memory, counts = torch.arange(12.0).reshape(4, 3), BatchHistory(), []
    for step, target in enumerate([noise + 1, noise, noise, noise, noise.new_zeros(4, 3), noise.new_zeros(4, 3)]):
        memory.add_inputs((torch.full((4, 3), float(step)),), is_watched=True)
        memory.compare_loss_targets(2 * F.mse_loss(torch.ones(4, 3, requires_grad=True), target))
        # A further micro-batch, or a closure that is called again, does not count.
        memory.compare_loss_targets(2 * F.mse_loss(torch.ones(4, 3, requires_grad=True), target))
        counts.append(float(memory.list_figures()["targets_again", ""]))
    assert counts == [0, 0, 1, 2, 0, 0]


def shifts(labels: list[torch.Tensor]) -> list[float]:
    memory, values = BatchHistory(), []
    for step, batch in enumerate(labels):
        memory.add_inputs((torch.full((len(batch), 2), float(step)),), is_watched=True)
        memory.compare_loss_targets(F.cross_entropy(torch.ones(len(batch), 10, requires_grad=True), batch))
        values += [float(value) for (name, _), value in memory.list_figures().items() if name == "label_shift"]
    return values


def test_labels_are_compared_with_what_chance_explains() -> None:
    """Random labels are about as far from earlier ones as chance explains; sorted ones are several times as far."""
    for size in (16, 256):
        generator = torch.Generator().manual_seed(size)
        drawn = [torch.randint(10, (size,), generator=generator) for _ in range(60)]
        values = shifts(drawn)
        assert len(values) == 57
        assert 0.85 < sum(values[20:]) / len(values[20:]) < 1.15 and max(values) < 2
    assert min(shifts([torch.full((32,), number % 10) for number in range(40)])) > 2.5


def test_zeroed_moments_are_found_and_loaded_ones_are_not() -> None:
    def mistakes(names: tuple[str, ...]) -> list[int]:
        torch.manual_seed(0)
        model, lines = nn.Linear(4, 3), list[StreamLine]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with fp8bench.watch(model, optimizer, told=lines.extend, health=False):
            for step in range(8):
                if step == 5:
                    optimizer.load_state_dict(optimizer.state_dict())
                    for state in optimizer.state.values():
                        for name in names:
                            state[name].zero_()
                F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [line.step for line in lines if isinstance(line, StepFigure) and line.name == MOMENTS_GONE]

    assert mistakes(()) == []
    assert mistakes(("exp_avg",)) == mistakes(("exp_avg", "exp_avg_sq")) == mistakes(("step",)) == [5]


def parts_in_eval(model: nn.Module, state: LoopState) -> dict[tuple[str, str], float]:
    return {key: float(value) for key, value in state.list_figures(dict(model.named_parameters())).items()}


def test_parts_that_change_to_eval_mode_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Dropout(0.0), nn.Dropout(0.2))
    state = LoopState(model)
    model[1].eval()
    assert parts_in_eval(model, state) == {}
    model[2].eval()
    model[3].eval()
    assert parts_in_eval(model, state) == {("parts_in_eval", "2"): 1}
    model[4].eval()
    assert parts_in_eval(model, state) == {("parts_in_eval", "2"): 2}
    # Dropout in eval mode from the start is a mistake, unless a part is frozen.
    assert parts_in_eval(model, LoopState(model)) == {("parts_in_eval", "2"): 2}
    model[0].requires_grad_(False)
    assert parts_in_eval(model, LoopState(model)) == {}


def test_steps_without_a_gradient_are_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state, optimizer = LoopState(model), torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for step in range(6):
        optimizer.zero_grad()
        (model(torch.ones(1, 2)) if step % 3 == 0 else model[0](torch.ones(1, 2))).sum().backward()
        state.begin_update(optimizer, [weight for weight in model.parameters() if weight.grad is None])
        counts.append(state.list_figures(dict(model.named_parameters())).get(("steps_without_gradient", "1"), 0))
    assert counts == [0, 1, 2, 0, 1, 2]


@pytest.fixture
def two_ranks() -> Iterator[tuple[ReplicaWeightCheck, ReplicaWeightCheck]]:
    """Replicas of both ranks in this process, with one store and without a rank to talk to."""
    import torch.testing._internal.distributed.fake_pg

    store = distributed.HashStore()
    distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    first, second, other_loop = (ReplicaWeightCheck(nn.Linear(2, 2)) for _ in range(3))
    second._rank, second._partners, second._store = 1, [0], first._store
    # Another loop in the same process group has other weights at the same steps.
    other_loop._rank = 1
    for step in range(0, 60, 10):
        other_loop.list_figures(step, [torch.tensor(-1.0)])
    yield first, second
    distributed.destroy_process_group()


def test_replicas_that_part_are_found(two_ranks: tuple[ReplicaWeightCheck, ReplicaWeightCheck]) -> None:
    """Each rank compares itself with the watched step before, when both have written."""
    found = []
    for step in range(0, 60, 10):
        weights = float(step), float(step) if step < 30 else step + 0.5
        found.append(
            [
                replicas.list_figures(step, [torch.tensor(value)])
                for replicas, value in zip(two_ranks, weights, strict=True)
            ]
        )
    apart = [{("replicas_apart", "rank 1"): 1.0}, {("replicas_apart", "rank 0"): 1.0}]
    assert found == [[{}, {}]] * 4 + [apart] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_shows_the_smallest_change_of_any_weight(dtype: torch.dtype) -> None:
    weights = [torch.randn(300, 7, dtype=dtype), torch.randn(300, 7, dtype=dtype)]
    digest = float(digest_weight_bits(weights))
    assert digest == float(digest_weight_bits([weight.clone() for weight in weights]))
    assert digest != float(digest_weight_bits(weights[::-1]))
    change = torch.nextafter(weights[1][5, 3], torch.tensor(9.0, dtype=dtype))
    weights[1][5, 3] = change
    assert digest != float(digest_weight_bits(weights))


def test_parts_of_a_model_are_no_replicas(two_ranks: tuple[ReplicaWeightCheck, ReplicaWeightCheck]) -> None:
    for step in range(0, 60, 10):
        for number, replicas in enumerate(two_ranks):
            assert replicas.list_figures(step, [torch.tensor(step + 0.5 * number)]) == {}


def test_a_rank_that_is_missing_is_not_waited_for(two_ranks: tuple[ReplicaWeightCheck, ReplicaWeightCheck]) -> None:
    assert [two_ranks[0].list_figures(step, [torch.tensor(1.0)]) for step in range(20)] == [{}] * 20
