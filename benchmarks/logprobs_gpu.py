"""Time and memory of log-probs and entropy of a linear head, beside other libraries.

    python benchmarks/logprobs_gpu.py [--cases plain,ours,...] [--widths 1024,2560] [--tokens 16384]

Hidden states [tokens, width] and a head [151,936, width], random, in bfloat16; the sampled token
has most of the probability, as in a trained model. Each case is a process of its own. Prints a
JSON line per case: median milliseconds of forward and backward together, GiB beyond the inputs at
the peak (both gradients among them), and the distance from float64 of the log-probs of some tokens
(largest) and of their gradient (relative). A peer that is not installed is named and left out.
Without a GPU it runs on tiny sizes, to show that it works: it says nothing about speed then.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trustbatch.training import linear_logprobs as ours
from trustbatch.training.linear_logprobs import EntropyUse

RESULTS = Path(__file__).parent / "results" / "logprobs_gpu.jsonl"
ENTROPY_COEFFICIENT = 0.01
CHECKED_TOKENS = 128
DEADLINE_S = 400
FLOAT32_HEAD = "ours-float32-head"
"""the case of a head kept in float32 and multiplied in bfloat16, as under autocast"""


@dataclass
class Inputs:
    """The inputs of every case; the gradient of the loss at a token's log-prob is `credit`."""

    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    credit: Tensor

    @classmethod
    def random(cls, tokens: int, vocabulary: int, width: int, device: str) -> "Inputs":
        """Logits of about N(0, 1), and 14 for the sampled token."""
        torch.manual_seed(0)
        with torch.device(device):
            weight = (torch.randn(vocabulary, width) / width**0.5).bfloat16()
            token_ids = torch.randint(vocabulary, (tokens,))
            hidden = (torch.randn(tokens, width) + 14 * weight[token_ids]).bfloat16()
            credit = torch.randn(tokens)
        return cls(hidden.requires_grad_(), weight.requires_grad_(), token_ids, credit)

    def loss(self, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Weigh the outputs as an objective with an entropy term would."""
        loss = (logp * self.credit.to(logp.dtype)).sum()
        return loss if entropy is None else loss + ENTROPY_COEFFICIENT * entropy.sum()


Outputs = tuple[Tensor, Tensor | None]
Case = Callable[[Inputs], Outputs]


def plain(inputs: Inputs) -> Outputs:
    """Logits in bfloat16, then everything in float32."""
    logits = (inputs.hidden @ inputs.weight.T).float()
    normalizer = logits.logsumexp(-1)
    logp = logits.gather(-1, inputs.token_ids[:, None]).squeeze(-1) - normalizer
    return logp, normalizer - ((logits - normalizer[:, None]).exp() * logits).sum(-1)


def plain_logp(inputs: Inputs) -> Outputs:
    """Without entropy."""
    logits = (inputs.hidden @ inputs.weight.T).float()
    logp = logits.gather(-1, inputs.token_ids[:, None]).squeeze(-1) - logits.logsumexp(-1)
    return logp, None


def ours_with(entropy: EntropyUse) -> Case:
    """Return ours, with one of its uses of the entropy."""

    def run(inputs: Inputs) -> Outputs:
        logp, _, found = ours.linear_logprobs(
            inputs.hidden,
            inputs.weight,
            None,
            inputs.token_ids,
            temperature=1.0,
            entropy=entropy,
            precision=torch.bfloat16,
        )
        return logp, found

    return run


def ours_frozen_head(inputs: Inputs) -> Outputs:
    """As with LoRA: no gradient of the head."""
    frozen = Inputs(inputs.hidden, inputs.weight.detach(), inputs.token_ids, inputs.credit)
    return ours_with(EntropyUse.LEARNED)(frozen)


def ours_prepass(inputs: Inputs) -> Outputs:
    """Only the log-probs, without gradient: one product."""
    with torch.no_grad():
        return ours_with(EntropyUse.NONE)(inputs)


def liger_scaled(inputs: Inputs) -> Outputs:
    """Liger's fused linear scaled cross entropy, the one that has entropy: its Hopper kernel."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    loss, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
        inputs.hidden, inputs.weight, inputs.token_ids, 1.0, -100, 1, True
    )
    return -loss, entropy


def liger_scaled_portable(inputs: Inputs) -> Outputs:
    """The same function where nvidia-cutlass-dsl is missing: chunks of 512 tokens in torch."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger

    loss, entropy = liger._FusedLinearPPOFallbackFunction.apply(
        inputs.hidden, inputs.weight, inputs.token_ids, 1.0, -100, True
    )
    return -loss, entropy


def liger_cross_entropy(inputs: Inputs) -> Outputs:
    """Liger's fused linear cross entropy; it has no entropy."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.token_ids, reduction="none"
    )
    return -loss, None


def liger_grpo(inputs: Inputs) -> Outputs:
    """The log-probs within Liger's fused linear GRPO loss; it has no entropy."""
    from liger_kernel.chunked_loss import fused_linear_ppo as liger

    logp = liger._ChunkedSelectiveLogProbFunction.apply(
        inputs.hidden,
        inputs.weight,
        inputs.token_ids,
        None,
        1.0,
        liger._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE,
    )
    return logp, None


def cut_cross_entropy(inputs: Inputs) -> Outputs:
    """With its defaults: gradients of improbable blocks are left out; it has no entropy."""
    from cut_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.token_ids, reduction="none")
    return -loss, None


def cut_cross_entropy_exact(inputs: Inputs) -> Outputs:
    """Nothing left out."""
    from cut_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.token_ids, reduction="none", filter_eps=None
    )
    return -loss, None


CASES: dict[str, Case] = {
    "plain": plain,
    "ours": ours_with(EntropyUse.LEARNED),
    "liger-scaled": liger_scaled,
    "liger-scaled-portable": liger_scaled_portable,
    "plain-logp": plain_logp,
    "ours-logp": ours_with(EntropyUse.NONE),
    "liger-ce": liger_cross_entropy,
    "liger-grpo": liger_grpo,
    "cce": cut_cross_entropy,
    "cce-exact": cut_cross_entropy_exact,
    "ours-entropy-reported": ours_with(EntropyUse.REPORTED),
    FLOAT32_HEAD: ours_with(EntropyUse.LEARNED),
    "ours-frozen-head": ours_frozen_head,
    "ours-prepass": ours_prepass,
}


def distances(inputs: Inputs, logp: Tensor, d_hidden: Tensor | None, with_entropy: bool) -> dict:
    """Compare some tokens with float64."""
    part = slice(0, CHECKED_TOKENS)
    hidden = inputs.hidden.detach()[part].double().requires_grad_()
    log_p = (hidden @ inputs.weight.detach().double().T).log_softmax(-1)
    exact = log_p.gather(1, inputs.token_ids[part, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    checked = Inputs(hidden, inputs.weight, inputs.token_ids[part], inputs.credit[part])
    checked.loss(exact, entropy if with_entropy else None).backward()
    found = {
        "logp_error": float((logp.detach()[part].double() - exact).abs().max()),
        "mean_logp": float(exact.mean()),
        "mean_entropy": float(entropy.mean()),
    }
    if d_hidden is not None and hidden.grad is not None:
        difference = d_hidden[part].double() - hidden.grad
        found["d_hidden_error"] = float(difference.norm() / hidden.grad.norm())
    return found


def run_case(name: str, tokens: int, vocabulary: int, width: int, repeats: int) -> dict:
    """Time one case in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = Inputs.random(tokens, vocabulary, width, device)
    if name == FLOAT32_HEAD:
        inputs.weight = inputs.weight.detach().float().requires_grad_()
    case = CASES[name]
    is_gpu = device == "cuda"
    before = torch.cuda.memory_allocated() if is_gpu else 0
    milliseconds = []
    logp, entropy = torch.zeros(0), None
    for _ in range(repeats + 3):
        inputs.hidden.grad = inputs.weight.grad = None
        if is_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        logp, entropy = case(inputs)
        loss = inputs.loss(logp, entropy)
        if loss.requires_grad:
            loss.backward()
        if is_gpu:
            torch.cuda.synchronize()
        milliseconds.append((time.perf_counter() - start) * 1e3)
        del loss
    learned = entropy is not None and entropy.requires_grad
    result = {
        "milliseconds": round(statistics.median(milliseconds[3:]), 3),
        "fastest": round(min(milliseconds[3:]), 3),
        "slowest": round(max(milliseconds[3:]), 3),
        "peak_gib": None,
        "entropy": "none" if entropy is None else "learned" if learned else "reported",
    }
    if is_gpu:
        result["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    return result | distances(inputs, logp, inputs.hidden.grad, learned)


def run_in_process(name: str, width: int) -> dict:
    """Run one case in its own process, and report why if there is no result."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", name, "--widths", str(width)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {DEADLINE_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        return json.loads(lines[-1].removeprefix("RESULT "))
    errors = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
    return {"failed": errors[-1] if errors else f"status {done.returncode}"}


def main() -> None:
    """Run each case in its own process and print what it took."""
    is_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tokens", type=int, default=16_384 if is_gpu else 256)
    parser.add_argument("--vocabulary", type=int, default=151_936 if is_gpu else 8_192)
    parser.add_argument("--widths", default="1024,2560" if is_gpu else "64")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--slice-mib", type=int, help="of ours; otherwise the module's constant")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.slice_mib:
        ours.GPU_SLICE_BYTES = ours.CPU_SLICE_BYTES = options.slice_mib * 2**20
    if options.one:
        result = run_case(
            options.one, options.tokens, options.vocabulary, int(options.widths), options.repeats
        )
        print("RESULT " + json.dumps(result))
        return
    names = options.cases.split(",")
    if unknown := set(names) - set(CASES):
        sys.exit(f"unknown cases {', '.join(unknown)}: choose from {', '.join(CASES)}")
    RESULTS.parent.mkdir(exist_ok=True)
    for width in map(int, options.widths.split(",")):
        for name in names:
            line = {
                "case": name,
                "tokens": options.tokens,
                "vocabulary": options.vocabulary,
                "width": width,
                "slice_mib": options.slice_mib,
                **run_in_process(name, width),
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if is_gpu else "cpu",
            }
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
