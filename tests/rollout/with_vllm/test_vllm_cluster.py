"""vLLM in the engine pool: real Ray, real vLLM (its CPU build), a real tiny model."""

import os
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.processes import command_line, descendants
from tests.support.rollout_files import read_rollouts

from trustbatch.api import train_config
from trustbatch.config import parse_config
from trustbatch.observe.run_folder import read_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
if find_spec("vllm") is None or find_spec("ray") is None:
    pytest.skip("vLLM or Ray is not installed", allow_module_level=True)

STEPS = 5
CHECKED = "canary/max_abs_logratio"


def test_engines_with_vllm_sample_beside_the_trainer_and_survive_kills(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """First vLLM is killed in an engine that lives on, then an engine, with which vLLM must end."""
    config = parse_config(
        {
            "model": {"name": str(tiny_folder), "device": "cpu"},
            "task": {"name": "arithmetic", "level": 1},
            "rollout": {
                "engine": "vllm",
                "prompts_per_step": 4,
                "samples_per_prompt": 2,
                "max_tokens": 4,
                "vllm": {"kv_cache_gib": 0.25, "enforce_eager": True},
            },
            "training": {"steps": STEPS, "learning_rate": 1e-3},
            "cluster": {"engines": 1, "reward_workers": 0, "max_lag": 1},
            "run": {"folder": str(tmp_path), "rollouts_every": 1},
        }
    )
    killed: list[list[bytes]] = []
    killer = threading.Thread(target=kill_meanwhile, args=(config.run.path, killed), daemon=True)
    killer.start()
    result = train_config(config)
    killer.join(timeout=10)

    assert [step["rollout/lag_max"] for step in result.metrics] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [len(each) for each in killed] == [1, 1]
    assert result.metrics[-1]["cluster/engine_restarts"] == 2
    assert "engine 0 was replaced: The vLLM process exited with status -9" in caplog.text
    folder = killed[0][0].strip(b"\0").rpartition(b"\0")[2]
    assert not Path(os.fsdecode(folder)).exists(), "files of the vLLM that was killed"
    # 4 prompts a step with 2 samples each: none is lost and none comes twice
    rows = [row for file in result.folder.glob("rollouts/*") for row in read_rollouts(file)]
    assert len({row["prompt_id"] for row in rows}) == 4 * STEPS
    assert len(rows) == 2 * 4 * STEPS
    # on a CPU in float32 both engines compute the same probabilities, up to rounding
    checked = [each[CHECKED] for each in result.metrics if CHECKED in each]
    assert len(checked) >= 3
    assert max(checked) < 1e-3
    deadline = time.monotonic() + 60.0
    while any(
        b"trustbatch.rollout.vllm.server" in command_line(pid) for pid in descendants(os.getpid())
    ):
        assert time.monotonic() < deadline, "vLLM outlives the engine that started it"
        time.sleep(0.1)


def kill_meanwhile(run: Path, killed: list[list[bytes]]) -> None:
    """Kill the vLLM after a step and the engine after a later one; notes their command lines."""
    for step, kind in ((1, b"trustbatch.rollout.vllm.server"), (3, b"ray::EngineActor")):
        while not run.is_dir() or len(read_metrics(run)) < step:
            time.sleep(0.02)
        commands = {pid: command_line(pid) for pid in descendants(os.getpid())}
        found = {pid: each for pid, each in commands.items() if kind in each}
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        killed.append(list(found.values()))
