"""vLLM in the fleet: real Ray, real vLLM (its CPU build), a real tiny model."""

import os
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.test_cluster import descendants

from trustbatch.api import train_config
from trustbatch.config import parse_config
from trustbatch.observe.run_folder import read_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
if find_spec("vllm") is None or find_spec("ray") is None:
    pytest.skip("vLLM or Ray is not installed", allow_module_level=True)

STEPS = 4
CHECKED = "canary/max_abs_logratio"


def test_engines_with_vllm_draw_beside_the_trainer_and_survive_a_kill(
    tiny_folder: Path, tmp_path: Path
) -> None:
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
            "run": {"folder": str(tmp_path)},
        }
    )
    killer = threading.Thread(target=kill_an_engine_after, args=(config.run.path, 2), daemon=True)
    killer.start()
    result = train_config(config)
    killer.join(timeout=10)

    assert [step["rollout/lag_max"] for step in result.metrics] == [0.0, 1.0, 1.0, 1.0]
    assert result.metrics[-1]["cluster/engine_restarts"] >= 1
    # on a CPU in float32 both engines compute the same probabilities, up to rounding
    checked = [each[CHECKED] for each in result.metrics if CHECKED in each]
    assert len(checked) >= 3
    assert max(checked) < 1e-3
    deadline = time.monotonic() + 60.0
    while any(b"vllm_server" in command(pid) for pid in descendants(os.getpid())):
        assert time.monotonic() < deadline, "vLLM outlives the engine that started it"
        time.sleep(0.1)


def kill_an_engine_after(run: Path, step: int) -> None:
    """Kill the engine's process once the run has taken a step; its vLLM must end with it."""
    while not run.is_dir() or len(read_metrics(run)) < step:
        time.sleep(0.02)
    for pid in descendants(os.getpid()):
        if command(pid).startswith(b"ray::EngineActor"):
            os.kill(pid, signal.SIGKILL)


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
