"""Seconds to sample 64 completions of 64 tokens on a CPU: native engine, transformers and vLLM.

    python benchmarks/rollout_cpu.py [--engines native,transformers,vllm] [--model smollm2]

SmolLM2-135M-Instruct in float32: 8 prompts of 60 to 110 tokens with the chat template, 8 samples of
each, 64 tokens (no stop token), log-probs of the sampled tokens on. Every engine runs in a process
of its own with the same number of threads, warms up with one full generation, and they take
turns for `--rounds` rounds. vLLM's interpreter is given with --vllm-python, as its CPU build needs
an environment of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ENGINES = ("native", "native-top16", "transformers", "vllm")
PROBLEMS = [
    "A baker sells 24 loaves in the morning and half as many in the afternoon. Each loaf costs 3 "
    "dollars. How much does she earn in a day?",
    "Tom has three times as many marbles as Ann, and together they have 48. How many has Ann?",
    "A train leaves at 9:40 and arrives at 13:05. It stops twice on the way, for 10 minutes each "
    "time. For how many minutes does it move?",
    "A rectangle is 4 cm longer than it is wide, and its perimeter is 40 cm. What is its area?",
    "In a class of 30 pupils 40% play chess, and a third of those also play the violin. How many "
    "pupils play both?",
    "A tank holds 360 litres. One pipe fills it in 6 hours, another empties it in 9 hours. How "
    "long does it take to fill it with both open?",
    "Mia reads 12 pages a day for a week and then 20 pages a day until her book of 264 pages is "
    "finished. How many days does she need in all?",
    "Four friends share a bill of 93 dollars. Two of them pay 10 dollars more than the other two. "
    "What does each of those who pay less pay?",
]
INSTRUCTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
NUM_SAMPLES, NUM_TOKENS = 8, 64


class Native:
    """The native engine."""

    def __init__(self, folder: str, top_logprobs: int) -> None:
        from trustbatch.models.policy import Policy
        from trustbatch.rollout.native.engine import NativeEngine
        from trustbatch.types import GenerationRequest, Prompt, SamplingParams

        policy = Policy.load(folder, device="cpu").freeze()
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, stop_token_ids=(), top_logprobs=top_logprobs
        )
        self.engine = NativeEngine(policy, seed=0)
        self.requests = [
            GenerationRequest(
                prompt_id=str(number),
                token_ids=policy.encode(
                    Prompt(id=str(number), text=problem + INSTRUCTION, answer="")
                ),
                num_samples=NUM_SAMPLES,
                sampling=sampling,
            )
            for number, problem in enumerate(PROBLEMS)
        ]

    def generate(self) -> int:
        """Return the number of tokens sampled."""
        return sum(len(completion.token_ids) for completion in self.engine.generate(self.requests))


class Transformers:
    """`generate` of transformers, with the log-probs gathered from its scores."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        texts = [chat_text(tokenizer, problem) for problem in PROBLEMS]
        self.inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)

    def generate(self) -> int:
        """Return the number of tokens sampled."""
        with self.torch.no_grad():
            output = self.model.generate(
                **self.inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=NUM_SAMPLES,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_scores=True,
            )
            logp = self.model.compute_transition_scores(
                output.sequences, output.scores, normalize_logits=True
            )
        return logp.numel()


class Vllm:
    """vLLM's CPU build."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM, SamplingParams

        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = LLM(
            model=folder,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=64,
            logprobs_mode="processed_logprobs",
        )
        self.sampling = SamplingParams(
            temperature=1.0,
            n=NUM_SAMPLES,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        self.prompts = [
            {
                "prompt_token_ids": tokenizer.encode(
                    chat_text(tokenizer, problem), add_special_tokens=False
                )
            }
            for problem in PROBLEMS
        ]

    def generate(self) -> int:
        """Return the number of tokens sampled; the prefixes of the last call are forgotten."""
        self.model.reset_prefix_cache()
        results = self.model.generate(self.prompts, self.sampling, use_tqdm=False)
        return sum(len(sample.token_ids) for result in results for sample in result.outputs)


def chat_text(tokenizer: Any, problem: str) -> str:
    """Return the problem as the chat template writes it."""
    message = [{"role": "user", "content": problem + INSTRUCTION}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)


def serve(engine: str, folder: str) -> None:
    """Generate once for each line on stdin, and answer with the seconds it took."""
    if engine.startswith("native"):
        peer: Native | Transformers | Vllm = Native(folder, 16 if "top16" in engine else 0)
    else:
        peer = Transformers(folder) if engine == "transformers" else Vllm(folder)
    peer.generate()
    print("READY", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        num_tokens = peer.generate()
        seconds = time.perf_counter() - start
        assert num_tokens == len(PROBLEMS) * NUM_SAMPLES * NUM_TOKENS
        print("SECONDS " + json.dumps(seconds), flush=True)


def await_line(process: subprocess.Popen[str], start: str) -> str:
    """Return the rest of the next line that starts so; other output is passed over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.removeprefix(start).strip()
    sys.exit(f"{process.args} ended with status {process.wait()}")


def main() -> None:
    """Start every engine, let them take turns, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="native,transformers")
    parser.add_argument("--model", default="smollm2", help="name or folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.model)
        return
    folder = options.model
    if not Path(folder).is_dir():
        from trustbatch.models.policy import Policy

        folder = "runs/benchmark-model"
        Policy.load(options.model, device="cpu").save(Path(folder))
    processes: dict[str, subprocess.Popen[str]] = {}
    for engine in options.engines.split(","):
        if engine not in ENGINES:
            sys.exit(f"unknown engine {engine!r}: choose from {', '.join(ENGINES)}")
        python = options.vllm_python if engine == "vllm" else sys.executable
        processes[engine] = subprocess.Popen(
            [python, __file__, "--serve", engine, "--model", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        await_line(processes[engine], "READY")
    seconds: dict[str, list[float]] = {engine: [] for engine in processes}
    for number in range(options.rounds):
        for engine, process in processes.items():
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            seconds[engine].append(float(await_line(process, "SECONDS ")))
            print(f"round {number + 1}: {engine} {seconds[engine][-1]:.2f} s", flush=True)
    first = statistics.median(next(iter(seconds.values())))
    for engine, times in seconds.items():
        process = processes[engine]
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)
        median = statistics.median(times)
        print(f"{engine:14} {median:7.2f} s   {median / first:5.2f} times the first's")


if __name__ == "__main__":
    main()
