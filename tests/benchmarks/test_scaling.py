"""The simulation of scaling against closed forms, brute force, and its own page."""

import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Any:
    """Import the benchmarks as their own folder sees them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import pacing  # pyright: ignore[reportMissingImports]
        import scaling  # pyright: ignore[reportMissingImports]
        import scaling_check  # pyright: ignore[reportMissingImports]
        import scaling_costs  # pyright: ignore[reportMissingImports]
        import scaling_decoding  # pyright: ignore[reportMissingImports]
        import scaling_schedule  # pyright: ignore[reportMissingImports]
        import scaling_streaming  # pyright: ignore[reportMissingImports]
        import scaling_workload  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.remove(str(BENCHMARKS))
    return SimpleNamespace(
        pacing=pacing,
        scaling=scaling,
        check=scaling_check,
        costs=scaling_costs,
        decoding=scaling_decoding,
        schedule=scaling_schedule,
        streaming=scaling_streaming,
        workload=scaling_workload,
    )


def equal_batches(
    scripts: Any, *, generate: float, train: float, count: int, chunks: int = 1
) -> Any:
    chunk = scripts.schedule.Chunk.of(np.full(4, generate))
    return [scripts.schedule.Batch(chunks=[chunk] * chunks, train=train) for _ in range(count)]


def random_batches(scripts: Any, *, count: int, chunks: int, seed: int) -> Any:
    generator = np.random.default_rng(seed)
    return [
        scripts.schedule.Batch(
            chunks=[
                scripts.schedule.Chunk.of(generator.lognormal(0.0, 0.7, size=5))
                for _ in range(chunks)
            ],
            train=float(generator.uniform(0.5, 3.0)),
        )
        for _ in range(count)
    ]


def run(scripts: Any, batches: Any, *, lag: int, steps: int = 30, **options: Any) -> Any:
    settings = {"engines": 1, "publish": 0.0, "load": 0.0} | options
    return scripts.schedule.simulate_pipeline(batches, lag=lag, steps=steps, **settings)


@pytest.mark.parametrize(("generate", "train"), [(3.0, 3.0), (5.0, 2.0), (2.0, 5.0)])
def test_equal_costs_overlap_from_lag_one_on(scripts: Any, generate: float, train: float) -> None:
    batches = equal_batches(scripts, generate=generate, train=train, count=40)
    for lag in (1, 2, 4):
        line = run(scripts, batches, lag=lag)
        assert scripts.schedule.steady(line, skip=6).step == pytest.approx(max(generate, train))
    sequential = [
        run(scripts, batches, lag=0),
        *(
            scripts.schedule.simulate_synchronous(
                batches, engines=1, lag=lag, steps=40, publish=0.0, load=0.0
            )
            for lag in (0, 1, 2)
        ),
    ]
    for line in sequential:
        assert np.diff(line.published[6:30]) == pytest.approx(generate + train)


def test_weights_cost_the_trainer_and_the_engines(scripts: Any) -> None:
    batches = equal_batches(scripts, generate=3.0, train=2.0, count=40, chunks=2)

    def step(lag: int) -> float:
        line = run(scripts, batches, lag=lag, engines=2, publish=0.5, load=0.25)
        return scripts.schedule.steady(line, skip=6).step

    assert step(0) == pytest.approx(3.0 + 2.0 + 0.5 + 0.25)
    assert step(1) == pytest.approx(max(3.0 + 0.25, 2.0 + 0.5))


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_several_batches_in_flight_are_bound_by_the_lag_alone(scripts: Any, lag: int) -> None:
    # batch b starts with version b - 1 - lag, is sampled, trained, and is version b: lag + 1 steps
    batches = equal_batches(scripts, generate=12.0, train=2.0, count=60)
    line = run(scripts, batches, lag=lag, engines=8, in_flight=lag + 1, steps=50)
    expected = max(2.0, (12.0 + 2.0) / (lag + 1))
    # counted over whole turns of the pipeline
    published = line.published
    turns = (49 - 6) // (lag + 1) * (lag + 1)
    assert (published[6 + turns] - published[6]) / turns == pytest.approx(expected)


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_every_batch_is_trained_once_in_order_within_its_lag(
    scripts: Any, lag: int, in_flight: int
) -> None:
    batches = random_batches(scripts, count=40, chunks=5, seed=lag)
    line = run(scripts, batches, lag=lag, engines=3, publish=0.1, load=0.2, in_flight=in_flight)
    assert len(line.taken) == len(line.published) == 30
    versions_out = [0.0, *line.published]  # when version v was out
    for number in range(30):
        assert line.versions[number] == max(0, number - lag)
        assert number - line.versions[number] <= lag
        assert line.sampled_from[number] >= versions_out[line.versions[number]]
        assert line.sampled_from[number] <= line.mostly_sampled[number] <= line.sampled[number]
        assert line.sampled[number] <= line.taken[number] < line.published[number]
        assert number == 0 or line.taken[number] >= line.published[number - 1]
        assert number < in_flight or line.sampled_from[number] >= min(
            line.sampled[number - in_flight : number]
        )
    assert 1 <= line.most_pending <= lag + 1


def test_an_engine_does_one_chunk_at_a_time(scripts: Any) -> None:
    batches = random_batches(scripts, count=40, chunks=7, seed=1)
    line = run(scripts, batches, lag=2, engines=3, load=0.2, in_flight=3)
    ends = [(end, -1) for _, end in line.engine_work]
    changes = sorted([*((start, 1) for start, _ in line.engine_work), *ends])
    busy = np.cumsum([change for _, change in changes])
    assert busy.max() == 3
    assert busy.min() == 0


@pytest.mark.parametrize("seed", range(5))
def test_more_lag_and_cheaper_parts_never_cost_time(scripts: Any, seed: int) -> None:
    batches = random_batches(scripts, count=40, chunks=4, seed=seed)

    def end(lag: int, **options: Any) -> float:
        return run(scripts, batches, lag=lag, **({"engines": 4} | options)).published[-1]

    by_lag = [end(lag, publish=0.1, load=0.1) for lag in (0, 1, 2, 4)]
    assert by_lag == sorted(by_lag, reverse=True)
    assert by_lag[0] > by_lag[1]
    assert end(1) < end(1, publish=0.5) < end(1, publish=0.5, load=0.5)
    assert end(1, engines=2) > end(1, engines=4)
    halved = [dataclasses.replace(batch, train=batch.train / 2) for batch in batches]
    assert run(scripts, halved, lag=1, engines=4).published[-1] < end(1)


def test_one_batch_at_a_time_gains_nothing_from_a_second_lag(scripts: Any) -> None:
    batches = equal_batches(scripts, generate=9.0, train=2.0, count=40)
    assert run(scripts, batches, lag=4).published == run(scripts, batches, lag=1).published


def test_too_few_batches_are_refused(scripts: Any) -> None:
    batches = equal_batches(scripts, generate=1.0, train=1.0, count=3)
    with pytest.raises(ValueError, match="too few"):
        run(scripts, batches, lag=1, steps=4)


@pytest.mark.parametrize("seats", [6, 20, 200])
def test_decoding_equals_a_walk_from_token_to_token(scripts: Any, seats: int) -> None:
    costs = scripts.costs.EngineCosts(step=1.0, row=0.1, cached=0.01, seats=seats)
    # short, so that many rows end together
    both = np.random.default_rng(seats).integers(1, 9, size=(2, 40, 3))
    ends = scripts.decoding.chunk_ends(costs, both, prompt=4)
    expected = [walked_ends(costs, groups, scripts.decoding.REFILL_BELOW) for groups in both]
    np.testing.assert_allclose(ends, expected, rtol=1e-9)


def walked_ends(costs: Any, groups: np.ndarray, refill_below: float) -> np.ndarray:
    """Decode one token after the other, with prompts of four tokens."""
    waiting = [(number, sample) for number in range(len(groups)) for sample in range(3)]
    running: dict[tuple[int, int], int] = {}
    expected = np.zeros(groups.shape)
    seconds = 0.0
    while waiting or running:
        if waiting and len(running) < refill_below * costs.seats:
            while waiting and (not running or len(running) + 3 <= costs.seats):
                running |= dict.fromkeys(waiting[:3], 0)
                del waiting[:3]
        seconds += costs.step_seconds(len(running), sum(4 + done for done in running.values()))
        running = {row: done + 1 for row, done in running.items()}
        for row in [row for row, done in running.items() if done == groups[row]]:
            expected[row] = seconds
            del running[row]
    return expected


def plain_costs(scripts: Any, *, step: float, token: float, seats: int = 10_000) -> Any:
    return scripts.costs.Costs(
        engine=scripts.costs.EngineCosts(step=step, row=0.0, cached=0.0, seats=seats),
        trainer=scripts.costs.TrainerCosts(token=token, pair=0.0, publish=0.0),
        load=0.0,
    )


@pytest.mark.parametrize("first_finished", [False, True])
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_streaming_with_equal_lengths_has_a_closed_form(
    scripts: Any, lag: int, first_finished: bool
) -> None:
    lengths = np.full((200, 4), 60)
    steps, skip = 1 + 4 * (lag + 1), 1  # whole turns of the pipeline
    means = scripts.streaming.simulate_streaming(
        lengths,
        plain_costs(scripts, step=1.0, token=10 / (4 * 4 * 60)),
        prompt=0,
        batch_groups=4,
        engines=2,
        trainers=1,
        lag=lag,
        steps=steps,
        skip=skip,
        first_finished=first_finished,
    )
    assert means.step == pytest.approx(max(10.0, (60.0 + 10.0) / (lag + 1)), rel=0.02)
    assert means.lag_max == lag


def test_streaming_with_one_seat_decodes_one_row_after_the_other(scripts: Any) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, size=(60, 1))
    means = scripts.streaming.simulate_streaming(
        lengths,
        plain_costs(scripts, step=1.0, token=0.0, seats=1),
        prompt=0,
        batch_groups=5,
        engines=1,
        trainers=1,
        lag=1,
        steps=10,
        skip=2,
        first_finished=False,
    )
    assert means.step * 8 == pytest.approx(lengths[10:50].sum())
    assert means.engine_idle == pytest.approx(0.0)
    assert means.rows == pytest.approx(1.0)


def test_streaming_in_order_keeps_its_bound_and_the_first_finished_do_not(scripts: Any) -> None:
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(4.0, 1.0, size=(400, 2)), 2000).astype(int) + 1
    settings: dict[str, Any] = {
        "prompt": 5,
        "batch_groups": 8,
        "engines": 3,
        "trainers": 2,
        "lag": 2,
        "steps": 30,
        "skip": 5,
    }
    costs = plain_costs(scripts, step=0.5, token=0.05, seats=12)
    ordered = scripts.streaming.simulate_streaming(lengths, costs, **settings, first_finished=False)
    finished = scripts.streaming.simulate_streaming(lengths, costs, **settings, first_finished=True)
    assert ordered.lag_max <= 2 < finished.lag_max
    assert finished.step < ordered.step


def test_costs_reproduce_what_was_measured(scripts: Any) -> None:
    costs = scripts.costs
    engine = costs.engine_costs(costs.QWEN3_06B, seats=512)
    assert 512 / engine.step_seconds(512, 512 * 320) == pytest.approx(71_140)
    trainer = costs.trainer_costs(costs.QWEN3_4B, longest=4096, objective="grpo")
    assert trainer.batch_seconds(np.full(16, 4096), 1) == pytest.approx(3.80, rel=0.01)
    assert costs.QWEN3_4B.parameters == pytest.approx(4.02e9, rel=0.01)


def test_a_sequence_is_never_divided_between_gpus(scripts: Any) -> None:
    costs = scripts.costs.TrainerCosts(token=1.0, pair=0.0, publish=0.0)
    lengths = np.array([[10, 10], [10, 30]])
    assert [costs.batch_seconds(lengths, gpus) for gpus in (1, 2, 4)] == [60.0, 30.0, 30.0]


def test_seeds_decide_what_is_sampled(scripts: Any) -> None:
    workload = scripts.workload.scaled_workload(scripts.workload.read_lengths(), mean=4096)
    assert workload.groups.mean() == pytest.approx(4096, rel=0.001)

    def sampled(seed: int, engines: int = 4) -> tuple[list[float], list[float]]:
        batches = scripts.workload.make_batches(
            workload, count=3, batch_groups=16, engines=engines, trainers=4, seed=seed
        )
        ends = [max(chunk.seconds for chunk in batch.chunks) for batch in batches]
        return ends, [batch.train for batch in batches]

    assert sampled(0) == sampled(0)
    assert sampled(0) != sampled(1)
    assert sampled(0)[1] == sampled(0, engines=2)[1]


def test_a_run_is_compared_with_its_simulation(scripts: Any) -> None:
    # lag 1: the first step waits for batch 1; batch 2 is sampled beside training on batch 1, and so
    # on
    metrics = [
        {"time/generate_seconds": wait, "time/step_seconds": step, "reward/mean": 0.0}
        for wait, step in [(2.0, 5.0), (0.0, 3.0), (1.5, 4.5)]
    ]
    pairs = scripts.check.compare_steps(
        metrics, generate=[2.0, 2.0, 5.5], train=[3.0] * 3, lag=1, asynchronous=True
    )
    assert [real.step for real, _ in pairs] == [5.0, 3.0, 4.5]
    assert [simulated.wait for _, simulated in pairs] == [2.0, 0.0, 2.5]
    assert [simulated.step for _, simulated in pairs] == [5.0, 3.0, 5.5]
    synchronous = scripts.check.simulated_run(
        generate=[2.0, 2.0, 5.5], train=[3.0] * 3, lag=1, asynchronous=False
    )
    assert [step.wait for step in synchronous] == [4.0, 5.5, 0.0]


def test_paced_runs_say_what_the_comparison_needs(
    scripts: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    with scripts.pacing.paced_loops([0.0], [0.0]):
        metrics = scripts.pacing.run_tiny(str(tiny_folder), tmp_path, steps=3, rollout={"lag": 1})
    assert [line["rollout/lag_mean"] for line in metrics] == [0.0, 1.0, 1.0]
    pairs = scripts.check.compare_steps(
        metrics, generate=[1.0] * 3, train=[1.0] * 3, lag=1, asynchronous=False
    )
    assert all(0 <= real.wait < real.step for real, _ in pairs)
    with pytest.raises(RuntimeError, match="0 batches"), scripts.pacing.paced_loops([0.0], [0.0]):
        pass


def test_a_paced_call_lasts_as_long_as_it_is_told(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(scripts.pacing.time, "sleep", slept.append)
    paced = scripts.pacing.Paced(str.upper, [100.0, 200.0])
    assert [paced("text") for _ in range(3)] == ["TEXT"] * 3
    assert [round(seconds) for seconds in slept] == [100, 200, 200]


def test_the_page_has_what_the_script_says(scripts: Any) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    workload = scripts.workload.scaled_workload(scripts.workload.read_lengths(), mean=4096)
    found = scripts.scaling.growth(scripts.scaling.Simulator(), workload, [8])
    for line in scripts.scaling.growth_table(found, [8]).splitlines():
        assert line in page
    assert not math.isnan(found["best lag 1"][0].steady.tail)
