"""The same training on one, two and four processes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import forked
from tests.support.ranks import layers_worker, train_worker, twice

from trustbatch import cli
from trustbatch.build import policies
from trustbatch.cli import main
from trustbatch.config import parse_config
from trustbatch.models.policy import Policy
from trustbatch.objectives import Totals
from trustbatch.objectives.estimators import RatioMoments
from trustbatch.observe.run_folder import read_metrics

ROOT = Path(__file__).parents[2]


def with_torchrun(config: Path) -> str:
    """Train in two processes, as a user starts them; return what they said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*command, "--nproc-per-node", "2", "-m", "tests.support.ranks.train", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def alone(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes."""
    output = tmp_path_factory.mktemp("ranks") / "alone"
    train_worker.main(str(tiny_folder), str(output))
    return output


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_objective_trains_the_same_on_any_number_of_ranks(
    num_ranks: int, alone: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """Uneven batches, ranks without a token, several micro-batches, passes and mini-batches."""
    output = tmp_path / "output"
    forked.in_ranks(num_ranks, train_worker.main, str(tiny_folder), str(output))
    expected = json.loads(Path(f"{alone}.json").read_text())
    actual = json.loads(Path(f"{output}.json").read_text())
    for name, batches in expected.items():
        for number, metrics in enumerate(batches):
            assert actual[name][number].keys() == metrics.keys()
            for key, value in metrics.items():
                found = actual[name][number][key]
                assert found == pytest.approx(value, rel=1e-5, abs=1e-8), (name, number, key)
    parameters = load_file(f"{alone}.safetensors")
    for name, tensor in load_file(f"{output}.safetensors").items():
        torch.testing.assert_close(tensor, parameters[name], rtol=1e-6, atol=1e-8)
    tokens, recorded = (load_file(f"{each}-tokens.safetensors") for each in (alone, output))
    assert recorded.keys() == tokens.keys()
    for name, values in recorded.items():
        torch.testing.assert_close(values, tokens[name], rtol=1e-5, atol=1e-7, equal_nan=True)


CONFIG = """
[model]
name = {model!r}
device = "cpu"
[task]
{task}
[rollout]
prompts_per_step = 5
samples_per_prompt = 4
max_tokens = 6
lag = 1
canary_every = 1
[objective]
entropy_coef = 0.1
[training]
steps = 4
learning_rate = 1e-3
[run]
name = "run"
folder = {folder!r}
checkpoint_every = 2
"""


GUESSES = """name = "guess_number"
higher = "+"
lower = "-"
invitation = "{highest}=\""""


def with_its_variables(config: Path) -> str:
    """Train in two processes that start at once."""
    return forked.in_ranks(2, main, ["train", str(config)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "start", "lora"),
    [
        ('name = "arithmetic"', with_torchrun, False),
        (GUESSES, with_its_variables, False),
        ('name = "arithmetic"', with_its_variables, True),
    ],
    ids=["one turn", "episodes", "adapters"],
)
def test_a_run_on_two_ranks_is_the_run_on_one_and_goes_on_alone(
    task: str, start: Callable[[Path], str], lora: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    """The whole loop: engines that share the work, the canary, checkpoints, one who writes."""
    if lora:
        pytest.importorskip("peft")
    configs = {name: tmp_path / f"{name}.toml" for name in ("one", "two")}
    for name, file in configs.items():
        text = CONFIG.format(model=str(tiny_folder), folder=str(tmp_path / name), task=task)
        text += "[model.lora]\nrank = 4\n" if lora else ""
        file.write_text(text.replace("'", '"'), encoding="utf-8")
    assert main(["train", str(configs["one"])]) == 0
    output = start(configs["two"])
    assert output.count("step 4/4") == 1
    expected = read_metrics(tmp_path / "one" / "run")
    assert_same_run(read_metrics(tmp_path / "two" / "run"), expected)
    most_turns = max(line.get("episode/turns_max", 1.0) for line in expected)
    assert (most_turns > 1) == (task == GUESSES)

    shutil.rmtree(tmp_path / "two" / "run" / "checkpoints" / "step-4")
    assert main(["train", str(configs["two"])]) == 0
    assert_same_run(read_metrics(tmp_path / "two" / "run"), expected)


def assert_same_run(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare all that does not measure rounding or time."""
    assert len(actual) == len(expected)
    for mine, other in zip(actual, expected, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            if not key.startswith(("time/", "canary/", "ledger/engine/")):
                assert mine[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key


@pytest.mark.slow
def test_adapters_and_other_ways_to_run_layers_train_the_same_on_two_ranks(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Frozen and trained parameters together, layers that are recomputed and compiled.

    Compiled layers learn what plain ones do, so one process need not compile for the comparison.
    """
    alone, together = tmp_path / "alone", tmp_path / "together"
    plain = tuple(name for name in layers_worker.VARIANTS if name != "compiled")
    layers_worker.main(str(tiny_folder), str(alone), plain)
    forked.in_ranks(2, layers_worker.main, str(tiny_folder), str(together))
    expected = json.loads(Path(f"{alone}.json").read_text())
    actual = json.loads(Path(f"{together}.json").read_text())
    weights = load_file(f"{alone}.safetensors")
    expected["compiled"], weights["compiled"] = expected["recomputed"], weights["recomputed"]
    for name, tensor in load_file(f"{together}.safetensors").items():
        # 8-bit moments are of float32 parameters, whose sums depend on their order
        is_rounded = name == "8-bit"
        difference = (tensor - weights[name]).abs()
        distance, limit = (difference.mean(), 3e-8) if is_rounded else (difference.max(), 1e-8)
        assert float(distance) < limit, name
        for number, metrics in enumerate(expected[name]):
            for key, value in metrics.items():
                found = actual[name][number][key]
                tolerance = 1e-3 if is_rounded else 1e-6
                assert found == pytest.approx(value, rel=tolerance, abs=1e-6), (name, number, key)


def test_several_ranks_have_the_precision_of_where_they_compute(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load on the CPU, and "auto" is not about that."""
    monkeypatch.setattr(policies, "num_ranks", lambda: 2)
    for device, precision in (("cuda", "bfloat16"), ("cpu", "float32")):
        tree = {
            "model": {"name": str(tiny_folder), "device": device},
            "task": {"name": "arithmetic"},
        }
        policy = policies.load_model(parse_config(tree))
        assert (policy.device.type, policy.precision) == ("cpu", precision)


@pytest.mark.parametrize(
    ("of_policy", "of_engine", "dtype"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "fp8", torch.bfloat16),
    ],
)
def test_a_replica_has_the_precision_of_the_engine(
    tiny_folder: Path, of_policy: str, of_engine: str, dtype: torch.dtype
) -> None:
    policy = Policy.load(str(tiny_folder), device="cpu", precision=of_policy)
    replica = policy.replica(torch.device("cpu"), precision=of_engine)
    assert replica.model.model.layers[0].mlp.up_proj.weight.dtype == dtype
    assert replica.model.model.embed_tokens.weight.dtype == torch.float32
    assert policy.model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32


def test_an_error_in_the_configuration_is_said_once_a_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "SECONDS_FOR_RANK_ZERO", 0.0)
    for rank, local_rank, says in (("0", "0", True), ("1", "1", False), ("8", "0", True)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert main(["train", "missing.toml"]) == 2
        assert ("no configuration file" in capsys.readouterr().err) == says


@pytest.mark.slow
def test_graders_are_asked_once_and_processes_train_twice(tmp_path: Path) -> None:
    """A grader that answers by chance must not divide the ranks."""
    output = forked.in_ranks(2, twice.main, tmp_path)
    assert output.count("asked") == 8  # two runs of one prompt x 4 samples, on rank 0 alone


def test_a_reference_without_adapters_computes_where_the_policy_does(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares the model, which is divided once; only the place has to follow."""
    pytest.importorskip("peft")
    elsewhere = torch.device("meta")
    divided: list[Policy] = []

    def divide(policy: Policy, **_: object) -> None:
        divided.append(policy)
        policy.device = elsewhere

    monkeypatch.setattr(policies, "shard", divide)
    model = {"name": str(tiny_folder), "device": "cpu", "lora": {"rank": 2}}
    config = parse_config({"model": model, "task": {"name": "arithmetic"}})
    policy = policies.load_policy(config)
    reference = policy.without_adapters()
    policies.shard_over_ranks(config, policy, reference)
    assert divided == [policy]
    assert reference.device == elsewhere


def test_totals_move_as_a_whole() -> None:
    """What is gathered over ranks is in host memory, and a GPU's clamp takes nothing from there."""
    totals = Totals(
        torch.ones(()), torch.ones(()), {"behavior": RatioMoments.of(torch.zeros(3))}
    ).to(torch.device("meta"))
    moments = totals.moments["behavior"]
    parts = [totals.num_tokens, totals.num_sequences, *vars(moments).values()]
    assert len(parts) == 7
    assert all(part.is_meta for part in parts)
