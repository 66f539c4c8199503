import io

from trustbatch.observe.progress import Progress

METRICS = {
    "reward/mean": 0.5,
    "policy/loss": -0.25,
    "one_minus_ess": 3.2e-5,
    "time/tokens_per_second": 12345.6,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_one_line_that_is_rewritten() -> None:
    stream = Terminal()
    progress = Progress("run", 50, stream=stream)
    for step in range(1, 51):
        progress.update(step, METRICS)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().count("\r") == 50
    assert "run  step 50/50  reward 0.500  loss -0.2500  1-ESS 3.2e-05  12,346 tok/s" in (
        stream.getvalue()
    )


def test_a_file_gets_about_ten_whole_lines() -> None:
    stream = io.StringIO()
    progress = Progress("run", 50, stream=stream)
    for step in range(1, 51):
        progress.update(step, METRICS)
    assert len(stream.getvalue().splitlines()) == 10
    assert "\r" not in stream.getvalue()


def test_a_file_gets_a_line_when_steps_are_slow() -> None:
    stream = io.StringIO()
    progress = Progress("run", 500, stream=stream)
    progress.update(1, METRICS)
    assert stream.getvalue() == ""
    progress._shown -= 60.0
    progress.update(2, METRICS)
    progress.update(3, METRICS)
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["2/500"]


def test_time_left_counts_only_the_steps_of_this_start() -> None:
    progress = Progress("run", 100, done=50, stream=io.StringIO())
    progress._start -= 10.0  # ten seconds for ten steps: forty to go
    assert progress.text(60, METRICS).endswith("0:40 left")


def test_lag_and_workers_are_shown_where_there_are_any() -> None:
    progress = Progress("run", 100, stream=io.StringIO())
    alone = METRICS | {"rollout/lag_mean": 0.0, "time/trainer_busy_share": 0.5}
    assert progress.text(60, alone).endswith(" left")
    assert progress.text(60, METRICS | {"rollout/lag_mean": 1.25}).endswith(" left  lag 1.25")
    side_by_side = alone | {"rollout/lag_mean": 2.0, "cluster/buffered_batches": 3.0}
    assert progress.text(60, side_by_side).endswith(" left  lag 2  buffer 3  trainer 50% busy")


def test_a_policy_that_becomes_random_is_warned_of_once() -> None:
    """The entropies of a run at temperature 1.2, which was lost at its fifth step."""
    stream = io.StringIO()
    progress = Progress("run", 1000, stream=stream)
    shown = []
    for step, entropy in enumerate((1.33, 1.09, 2.24, 3.68, 7.02, 9.74), start=1):
        progress.update(step, METRICS | {"entropy": entropy})
        shown.append(len(stream.getvalue().splitlines()))
    assert shown == [0, 0, 0, 1, 1, 1]
    assert stream.getvalue().startswith("Entropy has risen from 1.3 to 3.7 nats per token")


def test_entropy_that_moves_as_it_does_while_a_policy_learns_is_not_remarked() -> None:
    stream = io.StringIO()
    progress = Progress("run", 1000, stream=stream)
    for step, entropy in enumerate((0.34, 0.36, 0.38, 1.2, 0.2, 0.1), start=1):
        progress.update(step, METRICS | {"entropy": entropy})
    assert stream.getvalue() == ""


def test_entropy_is_compared_with_the_first_step_of_a_run_that_goes_on() -> None:
    stream = io.StringIO()
    progress = Progress("run", 1000, done=4, first={"entropy": 1.5}, stream=stream)
    progress.update(5, METRICS | {"entropy": 3.1})
    assert "from 1.5 to 3.1" in stream.getvalue()
