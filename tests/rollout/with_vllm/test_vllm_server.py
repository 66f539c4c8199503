"""vLLM in processes of its own (its CPU build, in float32): updates, deadlines, and their end."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.support.processes import descendants, shared_memory
from tests.support.vllm_cases import (
    LONG_PROMPT,
    SMALL,
    ask,
    gives_up_at_the_deadline_and_goes_on,
    load,
    logits_of,
    perturb,
    tokens,
)

from trustbatch.api import train_config
from trustbatch.config import parse_config
from trustbatch.errors import CanaryError, DeadEngineError, EngineError
from trustbatch.rollout.vllm.client import VllmClient
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.rollout.vllm.engine import VllmEngine
from trustbatch.rollout.vllm.requests import HostSettings, SampleRequest
from trustbatch.training.canary import Canary
from trustbatch.types import Prompt, SamplingParams

pytestmark = [
    pytest.mark.usefixtures("logs_of_failures_go_here"),
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]


@pytest.fixture(scope="module")
def server(long_folder: Path) -> Iterator[VllmEngine]:
    """vLLM in a process of its own, which reports raw log-probs; its log is kept after errors."""
    engine = VllmEngine(load(long_folder), VllmConfig(**SMALL), seed=7, logprob_mode="raw")
    yield engine
    engine.close()


def test_a_server_reports_raw_logprobs_and_takes_updates(server: VllmEngine) -> None:
    assert server.weight_transfer == "shared_memory"
    policy = server.policy
    for version in (1, 2):
        request = ask(policy, LONG_PROMPT, temperature=0.6, top_k=5, logprob_mode="raw")
        for completion in server.generate([request]):
            raw = torch.log_softmax(logits_of(policy, request, completion), -1)
            sampled = raw.gather(-1, completion.token_ids[:, None]).squeeze(-1)
            torch.testing.assert_close(completion.behavior_logp, sampled, atol=1e-3, rtol=0)
        perturb(policy, version)
        server.load_weights(policy.named_weights(), version)
        assert server.version == version


def test_a_full_disk_leaves_the_old_version_in_use(
    server: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask(server.policy, "12+34=", logprob_mode="raw")
    version, before = server.version, tokens(server.generate([request]))

    def no_room(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(EngineError, match="No space left on device"):
        server.load_weights(server.policy.named_weights(), version + 1)
    assert server.version == version
    assert tokens(server.generate([request])) == before


def test_a_canary_speaks_to_an_engine_with_raw_log_probs(server: VllmEngine) -> None:
    prompts = [Prompt(id="1", text="12+34=", answer="46")]
    canary = Canary(server, server.policy, prompts, logprob_mode="raw")
    assert canary.check(server.version)["canary/max_abs_logratio"] < 1e-3


def test_a_canary_notices_a_small_update_that_never_arrives(server: VllmEngine) -> None:
    prompts = [Prompt(id=each, text=each, answer="") for each in ("12+34=", "7-5=", "8*8=", "90+9")]
    policy, version = server.policy, server.version
    canary = Canary(server, policy, prompts, logprob_mode="raw")
    canary.check(version)
    for step, arrives in ((1, True), (2, False)):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.0 + 1e-5 * torch.randn(parameter.shape))
        if arrives:
            server.load_weights(policy.named_weights(), version + step)
            canary.check(version + step)
            continue
        server._version = version + step  # it says so, and has done nothing
        with pytest.raises(CanaryError, match=f"since version {version + 1} the trainer's"):
            canary.check(version + step)
    server.load_weights(policy.named_weights(), version + 3)


def test_a_server_gives_up_at_the_deadline_and_goes_on(server: VllmEngine) -> None:
    gives_up_at_the_deadline_and_goes_on(server)


def alive_in_group(group: int) -> list[int]:
    """Processes of a process group, zombies aside."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # gone in the meantime
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until_gone(group: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while alive_in_group(group):
        assert time.monotonic() < deadline, f"{alive_in_group(group)} are left after {seconds} s"
        time.sleep(0.05)


def pid_of(engine: VllmEngine) -> int:
    assert isinstance(engine._host, VllmClient)
    return engine._host.pid


def test_a_server_killed_mid_generation_is_an_error_at_once(server: VllmEngine) -> None:
    """The last test of this server."""
    group = pid_of(server)
    assert alive_in_group(group)
    timer = threading.Timer(1.0, os.kill, (group, signal.SIGKILL))
    timer.start()
    request = ask(server.policy, "1+1=", 512, max_tokens=500, stop_token_ids=(), logprob_mode="raw")
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"status -9.*sample 512 completions"):
        server.generate([request])
    assert 0.9 < time.monotonic() - start < 10
    wait_until_gone(group)
    with pytest.raises(EngineError, match="has exited"):
        server.generate([request])


def test_a_server_ends_with_the_core_that_computes_for_it(
    long_folder: Path, tmp_path: Path
) -> None:
    """On a GPU the core is a process of its own; vLLM would wait for one that was killed."""
    shutil.copy(long_folder / "config.json", tmp_path)
    settings = HostSettings(
        separate_core=True,
        folder=str(tmp_path),
        dtype_name="float32",
        quantization=None,
        logprob_mode="raw",
        top_logprobs=0,
        anchor_temperature=None,
        max_model_len=512,
        max_sequences=8,
        tensor_parallel=1,
        gpu_memory_utilization=0.5,
        kv_cache_bytes=2**28,
        enforce_eager=True,
        sleep=False,
        trust_remote_code=False,
    )
    logs = tmp_path / "run"
    client = VllmClient(
        settings, devices=None, log_folder=logs, start_seconds=300.0, update_seconds=60.0
    )
    group = client.pid
    (core,) = multiprocessing_children(group)
    threading.Timer(1.0, os.kill, (core, signal.SIGKILL)).start()
    sampling = SamplingParams(max_tokens=500, stop_token_ids=(), logprob_mode="raw")
    request = SampleRequest(token_ids=(1, 2, 3), seed=0, sampling=sampling)
    start = time.monotonic()
    with pytest.raises(DeadEngineError, match="sample 512 completions") as died:
        client.generate([request] * 512, 60.0)
    assert 0.9 < time.monotonic() - start < 20
    wait_until_gone(group)
    client.close()
    (log,) = logs.iterdir()
    assert f"log in {log}" in str(died.value)
    assert log.stat().st_mode & 0o777 == 0o600


def multiprocessing_children(parent: int) -> list[int]:
    """Processes that a process has started to compute in, and not to watch over resources."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if b"resource_tracker" not in command]


def test_a_server_that_does_not_start_in_time_is_ended(long_folder: Path) -> None:
    start = time.monotonic()
    with pytest.raises(
        EngineError,
        match=r"0\.5 seconds of waiting for vLLM to start.*rollout\.vllm\.start_seconds",
    ):
        VllmEngine(load(long_folder), VllmConfig(**SMALL, start_seconds=0.5), seed=0)
    assert time.monotonic() - start < 10


TRAINER = """
import sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.vllm_cases import LONG_PROMPT, SMALL, ask, largest_difference, load, perturb
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.rollout.vllm.engine import VllmEngine
policy = load(Path(sys.argv[1]))
config = VllmConfig(**SMALL, tensor_parallel=2)
engine = VllmEngine(policy, config, seed=0, anchor_temperature=1.0)
request = ask(policy, LONG_PROMPT, temperature=1.2, anchor_temperature=1.0)
plain = ask(policy, LONG_PROMPT)
differences = []
for version in (0, 1):
    sampled = engine.generate([request])
    anchors = [replace(each, behavior_logp=each.anchor_logp) for each in sampled]
    differences.append(largest_difference(policy, request, sampled))
    differences.append(largest_difference(policy, plain, anchors))
    if version == 0:
        perturb(policy, 1)
        engine.load_weights(policy.named_weights(), 1)
print(max(differences), engine._host.pid, engine._folder.name, flush=True)
time.sleep(600)
"""


def test_two_tensor_parallel_workers_agree_and_end_with_a_killed_trainer(
    long_folder: Path,
) -> None:
    """Four processes of vLLM, none of which is told that the trainer dies."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(long_folder), str(Path(__file__).parents[3])],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # as a user starts it: vLLM in this process has set variables of its own by now
        env={name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
    )
    assert trainer.stdout is not None
    difference, group, folder = trainer.stdout.readline().split()
    assert float(difference) < 1e-3
    assert len(alive_in_group(int(group))) >= 4
    segments = shared_memory(descendants(trainer.pid) | set(alive_in_group(int(group))))
    assert segments, "vLLM's queues"
    trainer.kill()
    trainer.wait()
    wait_until_gone(int(group))
    assert not Path(folder).exists()
    assert not [path for path in segments if path.exists()]


def test_a_run_trains_on_what_vllm_samples(tiny_folder: Path, tmp_path: Path) -> None:
    """Weights that were not updated after each step would show in the effective sample size."""
    config = parse_config(
        {
            "model": {"name": str(tiny_folder), "device": "cpu"},
            "task": {"name": "arithmetic", "level": 1},
            "rollout": {
                "engine": "vllm",
                "vllm": SMALL,
                "prompts_per_step": 8,
                "samples_per_prompt": 8,
                "max_tokens": 6,
            },
            "training": {"steps": 4, "learning_rate": 1e-2, "schedule": "constant"},
            "run": {"name": "vllm", "folder": str(tmp_path)},
        }
    )
    result = train_config(config)
    assert [step["step"] for step in result.metrics] == [1, 2, 3, 4]
    assert max(step["one_minus_ess"] for step in result.metrics) < 1e-6
    assert (result.checkpoint / "model.safetensors").is_file()
