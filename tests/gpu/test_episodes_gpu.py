"""Episodes on a real GPU: rows of unequal room, and turns that follow the whole conversation."""

from pathlib import Path

import pytest
import torch
from tests.support.episode_cases import episodes

from trustbatch.batching.micro_batches import micro_batches
from trustbatch.batching.sequences import to_sequences
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.training.logprobs import token_logprobs

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def test_every_turn_was_sampled_after_the_whole_conversation(tiny_folder: Path) -> None:
    policy = Policy.load(str(tiny_folder), device="cuda", precision="float32")
    engine = NativeEngine(policy, seed=0, max_sequences=16)
    groups = episodes(policy, engine=engine, temperature=1.0)
    sequences = to_sequences(groups, torch.zeros(6, 4))
    assert max(len(sequence.completion.turns) for sequence in sequences) > 4
    (batch,) = micro_batches(
        sequences, max_tokens=10_000, pad_token_id=policy.pad_token_id, packs=policy.packs
    )
    batch = batch.to(policy.device)
    assert len(batch.target) == sum(sequence.completion.num_sampled for sequence in sequences)
    with torch.no_grad():
        logp = token_logprobs(policy, batch, temperature=1.0).logp
    torch.testing.assert_close(logp, batch.behavior_logp, rtol=0, atol=1e-3)
    again = episodes(policy, engine=engine, temperature=1.0)
    assert [c.turns for g in again for c in g.completions] == [
        c.turns for g in groups for c in g.completions
    ]
