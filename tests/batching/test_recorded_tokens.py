"""What was recorded of each token reaches the batch: its anchor, the version that sampled it."""

from dataclasses import replace

import torch
from tests.support.train_sequences import make_completion

from trustbatch.batching.micro_batches import MicroBatch, micro_batches
from trustbatch.types import Completion, TrainSequence


def batch_of(*completions: Completion) -> MicroBatch:
    sequences = [
        TrainSequence(prompt_token_ids=(1, 2), completion=each, advantage=1.0)
        for each in completions
    ]
    (batch,) = micro_batches(sequences, max_tokens=10_000, pad_token_id=0, packs=True)
    return batch


def with_anchor(completion: Completion) -> Completion:
    assert completion.behavior_top_logp is not None
    return replace(
        completion,
        anchor_logp=completion.behavior_logp - 7.0,
        anchor_top_logp=completion.behavior_top_logp - 7.0,
    )


def test_a_batch_has_the_sampler_where_no_anchor_was_recorded() -> None:
    plain = make_completion([3, 5, 2], top=2)  # the longest comes first
    warm = with_anchor(make_completion([4, 6], top=2))
    batch = batch_of(warm, plain)
    assert batch.anchor_logp is not None
    assert batch.anchor_top_logp is not None
    # - token / 10, and 7 less where there is an anchor
    torch.testing.assert_close(batch.anchor_logp, torch.tensor([-0.3, -0.5, -0.2, -7.4, -7.6]))
    # - token, and one less for the next likely one
    torch.testing.assert_close(
        batch.anchor_top_logp,
        torch.tensor([[-3.0, -4], [-5, -6], [-2, -3], [-11, -12], [-13, -14]]),
    )
    batch = batch_of(plain, make_completion([9], top=2))
    assert batch.anchor_logp is None
    assert batch.anchor_top_logp is None


def test_the_anchor_of_the_environments_tokens_is_left_out() -> None:
    sampled = torch.tensor([True, False, True])
    batch = batch_of(with_anchor(replace(make_completion([3, 5, 2], top=2), sampled=sampled)))
    assert batch.anchor_logp is not None
    torch.testing.assert_close(batch.anchor_logp, torch.tensor([-7.3, -7.2]))


def test_every_token_has_the_version_that_sampled_it() -> None:
    """Sources are numbered by policy and version: versions 0, 2 and 5 are 0, 1 and 2."""
    spanning = replace(
        make_completion([3, 5, 2, 4]),
        versions=torch.tensor([2, 2, 9, 5]),
        sampled=torch.tensor([True, True, False, True]),
    )
    batch = batch_of(spanning, make_completion([7, 8]))
    assert batch.source.tolist() == [1, 1, 2, 0, 0]


def test_values_of_a_batch_are_given_back_to_their_completions() -> None:
    long, short = make_completion([3, 5, 2], sample=0), make_completion([4, 6], sample=1)
    sampled = replace(long, sampled=torch.tensor([True, False, True]))
    batch = batch_of(short, sampled)
    found = batch.by_completion(batch.target)
    assert {key: values.tolist() for key, values in found.items()} == {
        long.key: [3, 2],
        short.key: [4, 6],
    }
