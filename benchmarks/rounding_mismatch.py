"""How far from on-policy? 1-ESS of rollouts that round, on a real model.

    python benchmarks/rounding_mismatch.py [--model smollm2] [--device cpu] [--samples 2]

The eight problems of rollout_cpu.py with the chat template, 64 tokens of each sample at T = 1, by
the native engine in each precision; the trainer's own forward pass recomputes their log-probs. On a
CPU FP8 is emulated: the same rounding, computed in float32.
"""

import argparse

import torch
from rollout_cpu import INSTRUCTION, NUM_TOKENS, PROBLEMS

from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import GenerationRequest, Prompt, SamplingParams

ROUNDINGS = {
    "none": ("auto", "auto"),
    "FP8 keys and values": ("auto", "fp8"),
    "FP8 weights and activations": ("fp8", "auto"),
    "FP8 in both": ("fp8", "fp8"),
}


def main() -> None:
    """Print one row for each rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=2)
    options = parser.parse_args()
    policy = Policy.load(options.model, device=options.device).freeze()
    sampling = SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=())
    prompts = [
        Prompt(id=str(number), text=problem + INSTRUCTION, answer="")
        for number, problem in enumerate(PROBLEMS)
    ]
    requests = [
        GenerationRequest(
            prompt_id=prompt.id,
            token_ids=policy.encode(prompt),
            num_samples=options.samples,
            sampling=sampling,
        )
        for prompt in prompts
    ]
    print("| rounded | E[r] | 1-ESS | mean abs l | max abs l |")
    print("|---|---|---|---|---|")
    for name, (precision, kv_precision) in ROUNDINGS.items():
        engine = NativeEngine(policy, seed=0, precision=precision, kv_precision=kv_precision)
        log_ratio = log_ratios(policy, engine, requests)
        ratio = log_ratio.double().exp()
        ess = ratio.mean().square() / ratio.square().mean()
        print(
            f"| {name} | {ratio.mean():.4f} +- {ratio.std() / len(ratio) ** 0.5:.1g} | "
            f"{1 - ess:.2g} | {log_ratio.abs().mean():.2g} | {log_ratio.abs().max():.2g} |",
            flush=True,
        )


@torch.no_grad()
def log_ratios(
    policy: Policy, engine: NativeEngine, requests: list[GenerationRequest]
) -> torch.Tensor:
    """Return the policy's log-probs minus the recorded ones, of all tokens."""
    prompts = [request for request in requests for _ in range(request.num_samples)]
    found = []
    for request, completion in zip(prompts, engine.generate(requests), strict=True):
        ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
        logits = policy.logits(ids.to(policy.device), num_last=NUM_TOKENS + 1)[0, :-1]
        logp = logits.float().log_softmax(-1).cpu()
        taken = logp.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        found.append(taken - completion.behavior_logp)
    return torch.cat(found)


if __name__ == "__main__":
    main()
