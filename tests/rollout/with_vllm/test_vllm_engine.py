"""The vLLM engine against real vLLM (its CPU build, in float32) and a real tiny model.

vLLM takes long to start, so one engine in this process and one server serve most tests.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tests.support.episode_cases import episodes
from tests.support.processes import descendants, shared_memory
from tests.support.training_cases import policy_logp

from trustbatch.api import train_config
from trustbatch.batching.sequences import to_sequences
from trustbatch.config import parse_config
from trustbatch.errors import CanaryError, DeadEngineError, EngineError
from trustbatch.models.config import LoraConfig
from trustbatch.models.policy import Policy
from trustbatch.models.tiny import build_model, build_tokenizer
from trustbatch.rollout.sampling import sampling_logprobs
from trustbatch.rollout.vllm.client import VllmClient
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.rollout.vllm.engine import VllmEngine
from trustbatch.rollout.vllm.requests import HostSettings, SampleRequest
from trustbatch.training.canary import Canary
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TrainSequence,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]

SMALL = {"kv_cache_gib": 0.25, "enforce_eager": True}
LONG_PROMPT = "12+34=" * 50
"""more than two blocks of vLLM's cache on a CPU, which have 128 tokens"""
SETTINGS = [
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.2},
    {"top_k": 5},
    {"top_p": 0.7},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.8},
]


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for prompts of several cache blocks."""
    folder = tmp_path_factory.mktemp("models") / "long"
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = 512
    model = build_model(tokenizer, seed=0)
    model.config.max_position_embeddings = 512
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def logs_of_failures_go_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def load(folder: Path) -> Policy:
    return Policy.load(str(folder), device="cpu", precision="float32")


@pytest.fixture(scope="module")
def engine(long_folder: Path) -> Iterator[VllmEngine]:
    """vLLM in this process, at version 3."""
    config = VllmConfig(mode="in_process", **SMALL)
    engine = VllmEngine(
        load(long_folder), config, seed=7, version=3, max_sequences=256, top_logprobs=16
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(long_folder: Path) -> Iterator[VllmEngine]:
    """vLLM in a process of its own, which reports raw log-probs; its log is kept after errors."""
    engine = VllmEngine(load(long_folder), VllmConfig(**SMALL), seed=7, logprob_mode="raw")
    yield engine
    engine.close()


def ask(policy: Policy, prompt: str, num_samples: int = 4, **options: Any) -> GenerationRequest:
    settings = {"max_tokens": 12, "stop_token_ids": policy.stop_token_ids, **options}
    return GenerationRequest(
        prompt_id=prompt,
        token_ids=tuple(policy.tokenizer.encode(prompt)),
        num_samples=num_samples,
        sampling=SamplingParams(**settings),
    )


def test_episodes_are_sampled_turn_by_turn(engine: VllmEngine) -> None:
    """Each turn follows the whole conversation, and has random numbers of its own."""
    policy = engine.policy
    groups = episodes(policy, engine=engine, temperature=1.0)
    again = episodes(policy, engine=engine, temperature=1.0, indices=[1])
    assert [c.turns for c in again[0].completions] == [c.turns for c in groups[1].completions]
    sequences = to_sequences(groups, torch.zeros(6, 4))
    assert max(len(sequence.completion.turns) for sequence in sequences) > 4
    recorded = torch.cat([s.completion.of_policy(s.completion.behavior_logp) for s in sequences])
    torch.testing.assert_close(policy_logp(policy, sequences), recorded, rtol=0, atol=1e-3)


@torch.no_grad()
def logits_of(policy: Policy, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """Logits [n, V] of each token of a completion, by transformers in float32."""
    ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
    return policy.model(input_ids=ids).logits[0, len(request.token_ids) - 1 : -1]


def largest_difference(
    policy: Policy, request: GenerationRequest, completions: list[Completion]
) -> float:
    """Between recorded log-probs and a recomputation of the distribution sampled from."""
    worst = 0.0
    for completion in completions:
        logp = sampling_logprobs(logits_of(policy, request, completion), request.sampling)
        sampled = logp.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        worst = max(worst, float((sampled - completion.behavior_logp).abs().max()))
    return worst


def perturb(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize("options", SETTINGS)
def test_behavior_logp_is_that_of_the_distribution_sampled_from(
    engine: VllmEngine, options: dict[str, float]
) -> None:
    for prompt in ("12+34=", "9=", LONG_PROMPT):
        request = ask(engine.policy, prompt, **options)
        completions = engine.generate([request])
        assert largest_difference(engine.policy, request, completions) < 1e-3


@pytest.mark.parametrize("options", SETTINGS)
def test_tokens_come_as_often_as_their_probability_says(
    engine: VllmEngine, options: dict[str, float]
) -> None:
    """Pairs of first and second token, so that the second sample is seen to be independent."""
    policy, num_samples = engine.policy, 4000
    request = ask(policy, "55+44=", num_samples, max_tokens=2, stop_token_ids=(), **options)
    pairs = [tuple(c.token_ids.tolist()) for c in engine.generate([request])]
    vocabulary = range(policy.model.config.vocab_size)
    prompt = list(request.token_ids)
    with torch.no_grad():
        first_logits = policy.model(input_ids=torch.tensor([prompt])).logits[:, -1]
        rows = torch.tensor([[*prompt, token] for token in vocabulary])
        second_logits = policy.model(input_ids=rows).logits[:, -1]
    first = sampling_logprobs(first_logits, request.sampling)[0].double().exp()
    joint = first[:, None] * sampling_logprobs(second_logits, request.sampling).double().exp()
    joint = joint / joint.sum()
    counts = torch.zeros_like(joint)
    for one, two in pairs:
        counts[one, two] += 1
    assert counts[joint == 0].sum() == 0
    expected = joint * num_samples
    common = expected >= 5
    observed = [*counts[common].tolist(), float(counts[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = [w * sum(observed) / sum(wanted) for w in wanted]
    assert chisquare(observed, wanted).pvalue > 1e-4


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "top_p": 0.6}, {"top_k": 3}])
def test_top_logprobs_are_the_most_likely_tokens(
    engine: VllmEngine, options: dict[str, float]
) -> None:
    for num_top in (4, 16, 40):  # the vocabulary has 16 tokens
        request = ask(engine.policy, "12+34=", top_logprobs=num_top, **options)
        for completion in engine.generate([request]):
            shape = (len(completion.token_ids), min(num_top, 16))
            assert completion.top_token_ids is not None
            assert completion.behavior_top_logp is not None
            assert completion.top_token_ids.shape == completion.behavior_top_logp.shape == shape
            logits = logits_of(engine.policy, request, completion)
            expected = sampling_logprobs(logits, request.sampling)
            top = expected.topk(shape[1], dim=-1).values
            torch.testing.assert_close(completion.behavior_top_logp, top, atol=1e-3, rtol=0)
            recorded = expected.gather(-1, completion.top_token_ids)
            torch.testing.assert_close(recorded, top, atol=1e-3, rtol=0)


def test_samples_depend_on_seed_version_prompt_and_sample_alone(engine: VllmEngine) -> None:
    alone = engine.generate([ask(engine.policy, "9=")])
    among = engine.generate([ask(engine.policy, p, 6) for p in ("1+1=", "9=", "90-12=")])
    assert tokens(among[6:10]) == tokens(alone)
    assert len({tuple(t) for t in tokens(among)}) > 6, "samples differ from each other"


def test_more_prompts_than_fit_into_one_step_keep_their_seeds(engine: VllmEngine) -> None:
    """Together 14,000 tokens; vLLM computes at most 4,096 at a time."""
    prompts = [f"{number}+" + LONG_PROMPT[: 260 + number] for number in range(10, 60)]
    together = engine.generate([ask(engine.policy, prompt, 1) for prompt in prompts])
    for number in (0, 25, 49):
        alone = engine.generate([ask(engine.policy, prompts[number], 1)])
        assert tokens(alone) == tokens([together[number]])


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def test_a_completion_ends_with_its_stop_token_or_at_max_tokens(engine: VllmEngine) -> None:
    stop = engine.policy.stop_token_ids
    completions = engine.generate([ask(engine.policy, "12+34=", 64)])
    assert {c.finish_reason for c in completions} == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in completions:
        has_stopped = completion.token_ids[-1] in torch.tensor(stop)
        assert has_stopped == (completion.finish_reason == FinishReason.STOP)
        assert len(completion.behavior_logp) == len(completion.token_ids) <= 12
        assert completion.text == engine.policy.decode([completion.token_ids.tolist()])[0]
    endless = engine.generate([ask(engine.policy, "1+1=", max_tokens=300, stop_token_ids=())])
    assert [len(c.token_ids) for c in endless] == [300] * 4
    assert {c.finish_reason for c in endless} == {FinishReason.LENGTH}


def test_greedy_samples_the_most_likely_token_with_probability_1(engine: VllmEngine) -> None:
    request = ask(engine.policy, "12+34=", 1, temperature=0.0, top_logprobs=3)
    (completion,) = engine.generate([request])
    best = logits_of(engine.policy, request, completion).argmax(-1)
    assert torch.equal(completion.token_ids, best)
    assert completion.behavior_top_logp is not None
    assert torch.equal(completion.behavior_logp, torch.zeros(len(best)))
    assert completion.behavior_top_logp[0].tolist() == [0.0, -torch.inf, -torch.inf]


def test_requests_that_do_not_fit_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="context of 512"):
        engine.generate([ask(engine.policy, LONG_PROMPT, max_tokens=213)])
    with pytest.raises(EngineError, match="logprob_mode"):
        engine.generate([ask(engine.policy, "1+1=", logprob_mode="raw")])


def test_an_update_moves_the_version_and_drops_old_keys_and_values(engine: VllmEngine) -> None:
    request = ask(engine.policy, LONG_PROMPT)
    before = engine.generate([request])
    assert {c.provenance.version for c in before} == {engine.version} == {3}
    assert {(c.provenance.engine, c.provenance.precision) for c in before} == {("vllm", "float32")}
    perturb(engine.policy, 1)
    assert largest_difference(engine.policy, request, engine.generate([request])) > 0.1
    engine.load_weights(engine.policy.named_weights(), 4)
    after = engine.generate([request])
    assert {c.provenance.version for c in after} == {engine.version} == {4}
    assert largest_difference(engine.policy, request, after) < 1e-3


def test_an_engine_asleep_refuses_to_generate(engine: VllmEngine) -> None:
    engine.sleep()
    assert engine.generate([ask(engine.policy, "1+1=")]), "nothing sleeps unless configured"
    engine.config = engine.config.model_copy(update={"sleep": True})
    engine.sleep()
    with pytest.raises(EngineError, match="wake"):
        engine.generate([ask(engine.policy, "1+1=")])
    engine.wake()
    request = ask(engine.policy, LONG_PROMPT)
    assert largest_difference(engine.policy, request, engine.generate([request])) < 1e-3


def test_this_process_gives_up_at_the_deadline_and_goes_on(engine: VllmEngine) -> None:
    gives_up_at_the_deadline_and_goes_on(engine)


def gives_up_at_the_deadline_and_goes_on(engine: VllmEngine) -> None:
    config, mode = engine.config, engine.logprob_mode
    engine.config = config.model_copy(update={"generate_seconds": 0.2})
    endless = ask(engine.policy, "1+1=", 64, max_tokens=500, stop_token_ids=(), logprob_mode=mode)
    with pytest.raises(EngineError, match=r"rollout\.vllm\.generate_seconds"):
        engine.generate([endless])
    engine.config = config
    assert len(engine.generate([ask(engine.policy, "1+1=", logprob_mode=mode)])) == 4


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
from test_vllm_engine import LONG_PROMPT, SMALL, ask, largest_difference, load, perturb
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
        [sys.executable, "-c", TRAINER, str(long_folder), str(Path(__file__).parent)],
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


def test_adapters_alone_are_loaded_beside_frozen_weights(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update moves no weight, and drops the keys and values of the one before."""
    pytest.importorskip("peft")
    policy = load(long_folder)
    policy.add_adapters(LoraConfig(rank=12), seed=0)
    assert policy.adapters is not None
    policy.adapters.published_alone = True
    engine = VllmEngine(policy, VllmConfig(adapters="alone", **SMALL), seed=7, version=2)
    try:
        monkeypatch.setattr(VllmClient, "update", None)  # from here on no weight is sent
        request = ask(policy, LONG_PROMPT)
        sampled = []
        for version in (2, 3, 4):
            completions = engine.generate([request])
            assert {each.provenance.version for each in completions} == {version}
            sequences = [
                TrainSequence(prompt_token_ids=request.token_ids, completion=each, advantage=1.0)
                for each in completions
            ]
            recorded = torch.cat([each.behavior_logp for each in completions])
            torch.testing.assert_close(recorded, policy_logp(policy, sequences), atol=1e-5, rtol=0)
            sampled.append(torch.cat([each.behavior_logp for each in completions]))
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for _, parameter in policy.trained_parameters():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            engine.load_weights(policy.named_weights(), version + 1)
        assert sampled[0][0] != sampled[1][0] != sampled[2][0]
    finally:
        engine.close()


@pytest.mark.parametrize("adapters", ["merged", "alone"])
def test_a_run_with_adapters_trains_on_what_vllm_samples(
    tiny_folder: Path, tmp_path: Path, adapters: str
) -> None:
    pytest.importorskip("peft")
    config = parse_config(
        {
            "model": {"name": str(tiny_folder), "device": "cpu", "lora": {"rank": 4}},
            "task": {"name": "arithmetic", "level": 1},
            "rollout": {
                "engine": "vllm",
                "vllm": {**SMALL, "adapters": adapters},
                "prompts_per_step": 8,
                "samples_per_prompt": 4,
                "max_tokens": 6,
            },
            "objective": {"name": "grpo", "entropy_coef": 0.1},
            "training": {"steps": 3, "learning_rate": 1e-2, "schedule": "constant"},
            "run": {"name": "vllm", "folder": str(tmp_path)},
        }
    )
    result = train_config(config)
    assert all(line["one_minus_ess"] < 1e-6 for line in result.metrics)


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
