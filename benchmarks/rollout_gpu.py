"""Tokens per second of rollouts on one GPU, native engine and vLLM side by side.

    python benchmarks/rollout_gpu.py [--engines native,vllm,...] [--tokens 512] [--profile]
    python benchmarks/rollout_gpu.py --engines native,native-fp8@4b:128,vllm,vllm-fp8@4b:128

512 requests of 64 random tokens, each continued by 512 tokens (no stop token), bfloat16, log-probs
of the sampled tokens on; Qwen3-0.6B shape with random weights, or that of --shape. With --samples 8
they are 64 prompts with 8 samples each. ENGINE@SHAPE:REQUESTS has a shape and a number of its own.
Each engine runs in a process of its own and generates three times: the first includes warm-up, the
best counts. With --together all engines of vLLM, whose start takes minutes, are started at once and
first of all; each has the memory that its work needs, and they are timed one after the other.
Results go to stdout, and one JSON line each as they come to benchmarks/results/rollout_gpu.jsonl.

-fp8 rounds weights and activations, -kv8 keys and values.

native-lora decodes from frozen bfloat16 weights and adapters of rank 32 beside all linear layers;
native is as fast as an engine with the adapters merged.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

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
KEY_VALUE_HEADS, HEAD_DIM = 8, 128
PROMPT_TOKENS = 64
SPARE = 1.15
"""memory for keys and values of an engine that shares the GPU, relative to what they need"""
Generate = Callable[[], float]
"""generates everything once; returns the seconds"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is generated; numbers of tokens."""

    engine: str
    shape: str
    prompts: int
    samples: int
    prompt_tokens: int
    tokens: int

    @property
    def name(self) -> str:
        """As --engines has it."""
        return f"{self.engine}@{self.shape}:{self.prompts * self.samples}"

    @property
    def total(self) -> int:
        """Tokens generated."""
        return self.prompts * self.samples * self.tokens

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all tokens, if no prompt is shared."""
        tokens = self.prompts * self.samples * (self.prompt_tokens + self.tokens)
        layers = SHAPES[self.shape]["num_hidden_layers"]
        numbers = 2 * layers * KEY_VALUE_HEADS * HEAD_DIM
        return tokens * numbers * (1 if "-kv8" in self.engine else 2)


def make_model(folder: Path, shape: str) -> None:
    """Write a model of a Qwen3's shape, in bfloat16 with random weights, and any tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trustbatch.models.tiny import build_tokenizer

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=HEAD_DIM,
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


def native_engine(work: Workload, folder: Path) -> tuple[Generate, Callable[[], None]]:
    """Build the native engine; returns what generates, and what puts it to sleep."""
    from trustbatch.models.config import LoraConfig
    from trustbatch.models.policy import Policy
    from trustbatch.rollout.native.engine import NativeEngine
    from trustbatch.types import GenerationRequest, SamplingParams

    if work.engine.endswith("lora"):
        config = LoraConfig(rank=LORA_RANK)
        policy = Policy.load(str(folder), lora=config)
        policy.add_adapters(config, seed=0)
    else:
        policy = Policy.load(str(folder)).freeze()
    native = NativeEngine(
        policy,
        seed=0,
        max_sequences=512,
        precision="fp8" if "-fp8" in work.engine else "auto",
        kv_precision="fp8" if "-kv8" in work.engine else "auto",
    )
    sampling = SamplingParams(
        max_tokens=work.tokens, stop_token_ids=(), top_logprobs=16 if "top16" in work.engine else 0
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

    return generate, native.sleep


def vllm_engine(work: Workload, folder: Path, *, shares_gpu: bool) -> Generate:
    """Build vLLM with its own defaults; returns what generates."""
    from vllm import LLM, SamplingParams

    memory: dict[str, Any] = {"gpu_memory_utilization": 0.8}
    if shares_gpu:  # the first of the two is then only asked for at the start
        memory = {
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": int(SPARE * work.cache_bytes),
        }
    model = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=512,
        logprobs_mode="processed_logprobs",
        quantization="fp8" if "-fp8" in work.engine else None,
        kv_cache_dtype="fp8" if "-kv8" in work.engine else "auto",
        **memory,
    )
    sampling = SamplingParams(
        n=work.samples,
        temperature=1.0,
        max_tokens=work.tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=16 if "top16" in work.engine else 0,
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

    return generate


def run(work: Workload, folder: Path, options: argparse.Namespace, told: TextIO) -> None:
    """Time one engine, in its own process; `told` gets READY, and RESULT with what was found."""
    waits = options.together and work.engine.startswith("vllm")
    sleep = None
    if work.engine.startswith("vllm"):
        generate = vllm_engine(work, folder, shares_gpu=waits)
    else:
        generate, sleep = native_engine(work, folder)
    result: dict[str, Any] = {"seconds": [generate()]}
    if waits:
        told.write("READY\n")
        told.flush()
        sys.stdin.readline()
    result["seconds"] += [generate() for _ in range(2)]
    if sleep is not None:
        import torch

        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if options.profile:
            write_profile(generate)
        sleep()
        result["seconds_after_sleep"] = generate()
    told.write("RESULT " + json.dumps(result) + "\n")
    told.flush()


def write_profile(generate: Generate) -> None:
    """Write which kernels a generation spends its time in to stderr."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        generate()
    table = recorded.key_averages().table(sort_by="cuda_time_total", row_limit=18)
    sys.stderr.write(table + "\n")


class Worker:
    """The process of one engine."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        command = [sys.executable, __file__, *sys.argv[1:], "--one", json.dumps(asdict(work))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_for(self, word: str) -> str | None:
        """Return what follows the word in the line that begins with it; None if it never comes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        return None

    def result(self) -> dict[str, Any] | None:
        """Let it go on, and return what it found; None if it failed."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        text = self.wait_for("RESULT")
        self.process.stdin.close()
        self.process.wait()
        return None if text is None else json.loads(text)


def measure(works: Sequence[Workload], *, together: bool) -> None:
    """Run each engine in its own process, and print ratios to the first of its shape."""
    RESULTS.parent.mkdir(exist_ok=True)
    # those of vLLM end before others start, so that these have the memory
    early = [Worker(work) for work in works if together and work.engine.startswith("vllm")]
    for worker in early:
        worker.wait_for("READY")
    rates = {worker.work: timed(worker) for worker in early}
    rates |= {work: timed(Worker(work)) for work in works if work not in rates}
    for shape in dict.fromkeys(work.shape for work in works):
        of_shape = [(work, rate) for work in works if work.shape == shape and (rate := rates[work])]
        for work, rate in of_shape:
            ratio = of_shape[0][1] / rate
            print(f"{work.name:22} {rate:9,.0f} tokens/s   {of_shape[0][0].name} / it {ratio:5.2f}")


def timed(worker: Worker) -> float | None:
    """Write what an engine found, and return its tokens per second; None if it failed."""
    work, result = worker.work, worker.result()
    if result is None:
        print(f"{work.name}: failed with status {worker.process.returncode}", flush=True)
        return None
    rate = work.total / min(result["seconds"])
    with RESULTS.open("a") as file:
        file.write(json.dumps(asdict(work) | {"rate": rate, **result}) + "\n")
    print(f"{work.name:22} {rate:9,.0f} tokens/s   {result}", flush=True)
    return rate


def parse_engine(text: str, options: argparse.Namespace) -> Workload:
    """Read ENGINE[@SHAPE][:REQUESTS]."""
    text, _, requests = text.partition(":")
    engine, _, shape = text.partition("@")
    shape = shape or options.shape
    if engine not in ENGINES:
        sys.exit(f"unknown engine {engine!r}: choose from {', '.join(ENGINES)}")
    if shape not in SHAPES:
        sys.exit(f"unknown shape {shape!r}: choose from {', '.join(SHAPES)}")
    return Workload(
        engine=engine,
        shape=shape,
        prompts=int(requests or options.requests) // options.samples,
        samples=options.samples,
        prompt_tokens=options.prompt_tokens,
        tokens=options.tokens,
    )


def main() -> None:
    """Run what is asked for, or as a worker one engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="native,vllm", help="ENGINE[@SHAPE][:REQUESTS],...")
    parser.add_argument("--requests", type=int, default=512, help="prompts times samples")
    parser.add_argument("--samples", type=int, default=1, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--together", action="store_true", help="start vLLM's engines at once")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--folder", help="of models; made where they are not there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = Path(options.folder or tempfile.gettempdir())
    works = [parse_engine(text, options) for text in options.engines.split(",")]
    if options.one:
        # packages print on stdout what belongs to stderr
        told = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        work = Workload(**json.loads(options.one))
        run(work, model_folder(folder, work.shape), options, told)
        return
    for shape in dict.fromkeys(work.shape for work in works):
        if not (model_folder(folder, shape) / "config.json").is_file():
            make_model(model_folder(folder, shape), shape)
    measure(works, together=options.together)


def model_folder(folder: Path, shape: str) -> Path:
    """Return where a shape's model is."""
    return folder / f"trustbatch-qwen3-{shape}-bfloat16"


if __name__ == "__main__":
    main()
