"""What vLLM does on this machine: mismatch, updates, sleep, and the cost of recording.

    python benchmarks/gpu_vllm_check.py --output results.jsonl [--model FOLDER] [--cases a,b]

Each case starts vLLM in its own process and adds lines to the output as it goes. Without
--model the policy has the shape of Qwen3-0.6B and random weights; without a GPU it is a tiny one,
and cases that need a GPU are left out. About five minutes on one H200.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from trustbatch.models.policy import Policy
from trustbatch.models.tiny import build_model, build_tokenizer
from trustbatch.rollout.sampling import sampling_logprobs
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.rollout.vllm.engine import VllmEngine
from trustbatch.types import Completion, GenerationRequest, SamplingParams
from trustbatch.weight_sync.weight_chunks import SharedMemorySender

ON_GPU = torch.cuda.is_available()
PROMPT_TOKENS = 40
CASE_SECONDS = 280
ANCHOR = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""the distribution that P3O pulls to"""


class Report:
    """Lines of one case in the results file."""

    def __init__(self, file: Path, case: str) -> None:
        self.file, self.case = file, case
        self.start = time.perf_counter()

    def write(self, what: str, **values: Any) -> None:
        """Add a line, and print it."""
        seconds = round(time.perf_counter() - self.start, 1)
        line = json.dumps({"case": self.case, "what": what, "at_seconds": seconds, **values})
        with self.file.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def random_policy() -> Policy:
    """Qwen3-0.6B's shape; the final norm is raised until tokens differ in probability."""
    tokenizer = build_tokenizer()
    if not ON_GPU:
        return Policy(build_model(tokenizer, seed=0), tokenizer, name="tiny", precision="float32")
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    with torch.no_grad():
        model.model.norm.weight.fill_(5.0)
    return Policy(model.cuda(), tokenizer, name="qwen3-0.6b-shape", precision="bfloat16")


def requests(
    policy: Policy, *, prompts: int, samples: int, tokens: int, **options: Any
) -> list[GenerationRequest]:
    """Random prompts whose completions never stop early."""
    generator = torch.Generator().manual_seed(0)
    size = (prompts, PROMPT_TOKENS)
    ids = torch.randint(2, policy.model.config.vocab_size, size, generator=generator).tolist()
    sampling = SamplingParams(max_tokens=tokens, stop_token_ids=(), **options)
    return [
        GenerationRequest(
            prompt_id=str(number), token_ids=tuple(row), num_samples=samples, sampling=sampling
        )
        for number, row in enumerate(ids)
    ]


@torch.no_grad()
def mismatch(
    policy: Policy,
    asked: list[GenerationRequest],
    sampled: list[Completion],
    *,
    precision: str,
    anchor: bool = False,
) -> dict[str, float]:
    """Compare recorded log-probs with this process's recomputation of the same distribution."""
    policy.precision, before = precision, policy.precision
    per_prompt = len(sampled) // len(asked)
    differences: list[Tensor] = []
    for number, completion in enumerate(sampled):
        request = asked[number // per_prompt]
        ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
        logits = policy.logits(ids.to(policy.device), num_last=len(completion.token_ids) + 1)
        sampling = replace(request.sampling, **ANCHOR) if anchor else request.sampling
        logp = sampling_logprobs(logits[0, :-1], sampling).cpu()
        ours = logp.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        recorded = completion.anchor_logp if anchor else completion.behavior_logp
        assert recorded is not None, "the request asked for it"
        differences.append((ours - recorded).double())
    policy.precision = before
    difference = torch.cat(differences)
    ratio = difference.exp()
    return {
        "against": precision,
        "tokens": len(difference),
        "mean_abs": float(difference.abs().mean()),
        "max_abs": float(difference.abs().max()),
        "mean_ratio": float(ratio.mean()),
        "one_minus_ess": float(1 - ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
    }


def free_gib() -> float:
    """Return the GPU's free memory; on a CPU nothing is measured."""
    return torch.cuda.mem_get_info()[0] / 2**30 if ON_GPU else 0.0


def start(policy: Policy, report: Report, **options: Any) -> VllmEngine:
    """Start vLLM, and report how and with what."""
    own = ("top_logprobs", "precision", "anchor_temperature")
    of_engine = {name: options.pop(name) for name in own if name in options}
    small = {} if ON_GPU else {"kv_cache_gib": 0.25}
    before = free_gib()
    engine = VllmEngine(
        policy,
        VllmConfig(max_model_len=1024 if ON_GPU else 128, **small, **options),
        seed=0,
        **of_engine,
    )
    report.write(
        "started",
        config=engine.config.model_dump(exclude_none=True),
        transfer=engine.weight_transfer,
        host=engine._host.describe() if engine._host else None,
        gib_taken=round(before - free_gib(), 2),
    )
    return engine


def check_mismatch(engine: VllmEngine, report: Report) -> None:
    """Compare log-probs at several sampling settings, and two samples with the same seeds."""
    for options in ({}, {"temperature": 0.6}, {"temperature": 1.2, "top_p": 0.9, "top_k": 50}):
        asked = requests(engine.policy, prompts=16, samples=2, tokens=64, **options)
        sampled = engine.generate(asked)
        again = engine.generate(asked)
        same = sum(
            torch.equal(a.token_ids, b.token_ids) for a, b in zip(sampled, again, strict=True)
        )
        report.write("repeatability", sampling=options, same=same, of=len(sampled))
        for precision in dict.fromkeys(("float32", engine.policy.precision)):
            result = mismatch(engine.policy, asked, sampled, precision=precision)
            report.write("mismatch", sampling=options, **result)


@torch.no_grad()
def check_update(engine: VllmEngine, report: Report, how: str) -> None:
    """Change all weights: the old ones must show, and the new ones must not."""
    policy = engine.policy
    asked = requests(policy, prompts=16, samples=1, tokens=32)
    engine.generate(asked)
    for parameter in policy.model.parameters():
        parameter.add_(torch.randn_like(parameter) * parameter.abs().mean() * 0.1)
    stale = mismatch(policy, asked, engine.generate(asked), precision=policy.precision)
    seconds = []
    for version in (engine.version + 1, engine.version + 2):
        begun = time.perf_counter()
        engine.load_weights(policy.named_weights(), version)
        seconds.append(round(time.perf_counter() - begun, 3))
    fresh = mismatch(policy, asked, engine.generate(asked), precision=policy.precision)
    report.write(
        "update",
        how=how,
        seconds=seconds,
        stale_mean_abs=stale["mean_abs"],
        fresh_mean_abs=fresh["mean_abs"],
        took_effect=fresh["mean_abs"] < stale["mean_abs"] / 3,
    )


def check_sleep(engine: VllmEngine, report: Report) -> None:
    """Check freed memory, an update of a sleeping engine, and that samples stay the same."""
    asked = requests(engine.policy, prompts=16, samples=1, tokens=32)
    before = engine.generate(asked)
    awake = free_gib()
    begun = time.perf_counter()
    engine.sleep()
    asleep, slept = free_gib(), time.perf_counter()
    engine.load_weights(engine.policy.named_weights(), engine.version)
    updated = time.perf_counter()
    engine.wake()
    woken = time.perf_counter()
    after = engine.generate(asked)
    same = sum(torch.equal(a.token_ids, b.token_ids) for a, b in zip(before, after, strict=True))
    report.write(
        "sleep",
        gib_freed=round(asleep - awake, 2),
        gib_back=round(asleep - free_gib(), 2),
        sleep_seconds=round(slept - begun, 3),
        update_seconds=round(updated - slept, 3),
        wake_seconds=round(woken - updated, 3),
        same=same,
        of=len(after),
    )


def case_in_process(policy: Policy, report: Report) -> None:
    """bfloat16 in this process."""
    engine = start(policy, report, mode="in_process", enforce_eager=True, sleep=ON_GPU)
    check_mismatch(engine, report)
    check_update(engine, report, engine.weight_transfer)
    check_sleep(engine, report)
    engine.close()


def case_server(policy: Policy, report: Report) -> None:
    """bfloat16 in a server; weights by CUDA IPC and by shared memory."""
    engine = start(policy, report, enforce_eager=True, sleep=ON_GPU)
    check_mismatch(engine, report)
    check_update(engine, report, engine.weight_transfer)
    engine._sender = SharedMemorySender(engine.dtype, "/dev/shm")
    check_update(engine, report, "shared_memory")
    check_sleep(engine, report)
    engine.close()


def case_fp8(policy: Policy, report: Report) -> None:
    """FP8 in a server."""
    engine = start(policy, report, precision="fp8", enforce_eager=True)
    check_mismatch(engine, report)
    check_update(engine, report, engine.weight_transfer)
    engine.close()


def case_anchor(policy: Policy, report: Report) -> None:
    """Both distributions of a server, as the trainer recomputes them."""
    engine = start(policy, report, enforce_eager=True, top_logprobs=16, anchor_temperature=1.0)
    for options in ({"temperature": 0.6}, {"temperature": 1.2, "top_p": 0.9, "top_k": 50}):
        asked = requests(
            policy, prompts=16, samples=2, tokens=64, anchor_temperature=1.0, **options
        )
        sampled = engine.generate(asked)
        for anchor in (False, True):
            result = mismatch(policy, asked, sampled, precision=policy.precision, anchor=anchor)
            report.write("mismatch", sampling=options, anchor=anchor, **result)
    engine.close()


def case_throughput(policy: Policy, report: Report) -> None:
    """A server with CUDA graphs."""
    throughput(policy, report, mode="server")


def case_throughput_anchor(policy: Policy, report: Report) -> None:
    """The same with the anchor recorded."""
    throughput(policy, report, mode="server", anchor_temperature=1.0)


def case_throughput_in_process(policy: Policy, report: Report) -> None:
    """Everything in one process, without CUDA graphs."""
    throughput(policy, report, mode="in_process", enforce_eager=True)


def throughput(policy: Policy, report: Report, **options: Any) -> None:
    """Time 512 completions of 512 tokens at T = 1.2, without and with the 16 most likely tokens."""
    anchor = options.get("anchor_temperature")
    how = {"temperature": 1.2, "anchor_temperature": anchor}
    engine = start(policy, report, gpu_memory_utilization=0.6, top_logprobs=16, **options)
    shape = {"prompts": 64, "samples": 8, "tokens": 512 if ON_GPU else 64}
    engine.generate(requests(policy, prompts=64, samples=1, tokens=16, top_logprobs=16, **how))
    for num_top in (0, 16) if ON_GPU else (0, 16, 0, 16):
        begun = time.perf_counter()
        sampled = engine.generate(requests(policy, **shape, top_logprobs=num_top, **how))
        seconds = time.perf_counter() - begun
        tokens = sum(len(completion.token_ids) for completion in sampled)
        report.write(
            "throughput",
            mode=engine.config.mode,
            eager=engine.config.enforce_eager,
            top_logprobs=num_top,
            anchor=anchor is not None,
            seconds=round(seconds, 2),
            tokens=tokens,
            tokens_per_second=round(tokens / seconds),
        )
    engine.close()


CASES: dict[str, Callable[[Policy, Report], None]] = {
    "in_process": case_in_process,
    "server": case_server,
    "fp8": case_fp8,
    "anchor": case_anchor,
    "throughput": case_throughput,
    "throughput_anchor": case_throughput_anchor,
    "throughput_in_process": case_throughput_in_process,
}
NEED_A_GPU = ("fp8",)


def main() -> int:
    """Run each case in its own process, or one case in this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", help="folder of a Hugging Face checkpoint")
    parser.add_argument("--cases", help=f"some of {','.join(CASES)}; default: all")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        policy = Policy.load(options.model) if options.model else random_policy()
        CASES[options.case](policy, Report(options.output, options.case))
        return 0
    chosen = options.cases.split(",") if options.cases else list(CASES)
    chosen = [case for case in chosen if ON_GPU or case not in NEED_A_GPU]
    model = ["--model", options.model] if options.model else []
    failed = []
    for case in chosen:
        command = [sys.executable, __file__, "--output", str(options.output), *model]
        try:
            status = subprocess.run([*command, "--case", case], timeout=CASE_SECONDS).returncode
        except subprocess.TimeoutExpired:
            status = "timed out"
        if status != 0:
            Report(options.output, case).write("failed", status=status)
            failed.append(case)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
