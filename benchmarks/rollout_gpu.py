"""Tokens per second of rollouts on one GPU, native engine and vLLM side by side.

    python benchmarks/rollout_gpu.py [--engines native,vllm,...] [--tokens 512] [--profile]

512 requests of 64 random tokens, each continued by 512 tokens (no stop token), bfloat16, log-probs
of the sampled tokens on; Qwen3-0.6B shape with random weights, or that of --shape. With --samples 8
they are 64 prompts with 8 samples each. Each engine runs in a process of its own and generates
three times: the first includes warm-up, the best counts. Results go to stdout, and one JSON line
each as they come to benchmarks/results/rollout_gpu.jsonl.

-fp8 rounds weights and activations, -kv8 keys and values.

native-lora decodes from frozen bfloat16 weights and adapters of rank 32 beside all linear layers;
native is as fast as an engine with the adapters merged.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENGINES = (
    "native",
    "native-lora",
    "native-top16",
    "native-fp8",
    "native-kv8",
    "native-fp8-kv8",
    "vllm",
    "vllm-top16",
    "vllm-fp8",
    "vllm-kv8",
)
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "tie_word_embeddings": True},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": False},
}
LORA_RANK = 32
RESULTS = Path(__file__).parent / "results" / "rollout_gpu.jsonl"
VOCABULARY = 151_936
PROMPT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is generated; numbers of tokens."""

    prompts: int
    samples: int
    prompt_tokens: int
    tokens: int

    @property
    def total(self) -> int:
        """Tokens generated."""
        return self.prompts * self.samples * self.tokens


def make_model(folder: Path, shape: str = "0.6b") -> None:
    """Write a model of a Qwen3's shape, in bfloat16 with random weights, and any tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trustbatch.models.tiny import build_tokenizer

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=1,
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def make_prompts(count: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Random prompts, the same for every engine."""
    numbers = random.Random(0)
    return [[numbers.randrange(2, VOCABULARY) for _ in range(length)] for _ in range(count)]


def run_native(engine: str, folder: Path, work: Workload, profile: bool) -> dict:
    """Time the native engine; returns the seconds of each generation."""
    import torch

    from trustbatch.models.config import LoraConfig
    from trustbatch.models.policy import Policy
    from trustbatch.rollout.native.engine import NativeEngine
    from trustbatch.types import GenerationRequest, SamplingParams

    if engine.endswith("lora"):
        config = LoraConfig(rank=LORA_RANK)
        policy = Policy.load(str(folder), lora=config)
        policy.add_adapters(config, seed=0)
    else:
        policy = Policy.load(str(folder)).freeze()
    native = NativeEngine(
        policy,
        seed=0,
        max_sequences=512,
        precision="fp8" if "-fp8" in engine else "auto",
        kv_precision="fp8" if "-kv8" in engine else "auto",
    )
    sampling = SamplingParams(
        max_tokens=work.tokens, stop_token_ids=(), top_logprobs=16 if "top16" in engine else 0
    )
    asked = [
        GenerationRequest(
            prompt_id=str(number),
            token_ids=tuple(prompt),
            num_samples=work.samples,
            sampling=sampling,
        )
        for number, prompt in enumerate(make_prompts(work.prompts, work.prompt_tokens))
    ]

    def generate() -> float:
        start = time.perf_counter()
        sampled = native.generate(asked)
        seconds = time.perf_counter() - start
        assert sum(len(completion.token_ids) for completion in sampled) == work.total
        return seconds

    seconds = [generate() for _ in range(3)]
    result = {"seconds": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    if profile:
        from torch.profiler import ProfilerActivity

        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as recorded:
            generate()
        table = recorded.key_averages().table(sort_by="cuda_time_total", row_limit=18)
        sys.stderr.write(table + "\n")
    native.sleep()
    result["seconds_after_sleep"] = generate()
    return result


def run_vllm(engine: str, folder: Path, work: Workload, profile: bool) -> dict:
    """Time vLLM with its own defaults; returns the seconds of each generation."""
    from vllm import LLM, SamplingParams

    del profile
    model = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=512,
        gpu_memory_utilization=0.8,
        logprobs_mode="processed_logprobs",
        quantization="fp8" if "-fp8" in engine else None,
        kv_cache_dtype="fp8" if "-kv8" in engine else "auto",
    )
    sampling = SamplingParams(
        n=work.samples,
        temperature=1.0,
        max_tokens=work.tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=16 if "top16" in engine else 0,
    )
    asked = [
        {"prompt_token_ids": prompt} for prompt in make_prompts(work.prompts, work.prompt_tokens)
    ]

    def generate() -> float:
        start = time.perf_counter()
        sampled = model.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        outputs = [output for result in sampled for output in result.outputs]
        assert sum(len(output.token_ids) for output in outputs) == work.total
        return seconds

    return {"seconds": [generate() for _ in range(3)]}


def main() -> None:
    """Run each engine in its own process and print ratios to the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="native,vllm")
    parser.add_argument("--requests", type=int, default=512, help="prompts times samples")
    parser.add_argument("--samples", type=int, default=1, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--folder", help="of the model; made where it is not there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    name = f"trustbatch-qwen3-{options.shape}-bfloat16"
    folder = Path(options.folder or Path(tempfile.gettempdir()) / name)
    work = Workload(
        prompts=options.requests // options.samples,
        samples=options.samples,
        prompt_tokens=options.prompt_tokens,
        tokens=options.tokens,
    )
    if options.one:
        run = run_vllm if options.one.startswith("vllm") else run_native
        result = run(options.one, folder, work, options.profile)
        print("RESULT " + json.dumps(result))
        return
    if not (folder / "config.json").is_file():
        make_model(folder, options.shape)
    RESULTS.parent.mkdir(exist_ok=True)
    rates: dict[str, float] = {}
    for engine in options.engines.split(","):
        if engine not in ENGINES:
            sys.exit(f"unknown engine {engine!r}: choose from {', '.join(ENGINES)}")
        command = [sys.executable, __file__, *sys.argv[1:], "--one", engine]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{engine}: failed with status {done.returncode}")
            continue
        result = json.loads(lines[-1].removeprefix("RESULT "))
        rates[engine] = work.total / min(result["seconds"])
        with RESULTS.open("a") as file:
            line = {"engine": engine, "shape": options.shape, **asdict(work)}
            line |= {"rate": rates[engine], **result}
            file.write(json.dumps(line) + "\n")
        first = next(iter(rates.values()))
        print(
            f"{engine:14} {rates[engine]:9,.0f} tokens/s   {first / rates[engine]:5.2f} times "
            f"slower than the first   {result}",
            flush=True,
        )


if __name__ == "__main__":
    main()
