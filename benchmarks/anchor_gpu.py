"""What it costs the native engine to record the model's log-probs beside the sampler's.

    python benchmarks/anchor_gpu.py [--tokens 192] [--requests 512]

Qwen3-0.6B shape with random weights, 512 requests of 64 tokens, 16 most likely tokens recorded,
bfloat16. For each sampling the engine generates with and without the anchor, in turns; the best of
four counts. Prints tokens per second of both and the ratio, as JSON lines.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from rollout_gpu import make_model, make_prompts

from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import GenerationRequest, SamplingParams

SAMPLINGS = {"T = 1": {}, "T = 1.2": {"temperature": 1.2}, "top-p 0.95": {"top_p": 0.95}}
ROUNDS = 4


def main() -> None:
    """Time every sampling with and without an anchor."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--requests", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        policy = Policy.load(folder).freeze()
    # an engine each, so that both keep their recorded graphs
    engines = [NativeEngine(policy, seed=0, max_sequences=args.requests) for _ in range(2)]
    for name, options in SAMPLINGS.items():
        seconds: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for which, anchor in enumerate((None, 1.0)):
                sampling = SamplingParams(
                    max_tokens=args.tokens,
                    stop_token_ids=(),
                    top_logprobs=16,
                    anchor_temperature=anchor,
                    **options,
                )
                seconds[which].append(generate(engines[which], sampling, args.requests))
        rates = [args.requests * args.tokens / min(each) for each in seconds]
        record = {"sampling": name, "plain": rates[0], "anchor": rates[1]}
        record["ratio"] = rates[1] / rates[0]
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        print(json.dumps(record | {"device": device}), flush=True)


def generate(engine: NativeEngine, sampling: SamplingParams, num_requests: int) -> float:
    """Return the seconds of one generation."""
    requests = [
        GenerationRequest(
            prompt_id=str(number), token_ids=tuple(prompt), num_samples=1, sampling=sampling
        )
        for number, prompt in enumerate(make_prompts(num_requests))
    ]
    start = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
