"""Whether two models mean the same by a token id."""

from transformers import PreTrainedTokenizerBase

from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy


def same_tokenizer(second: Policy, trained: Policy, *, top_logprobs: int) -> None:
    """Make a second policy sample from the trained policy's tokens, or refuse it.

    Models of one family often have embeddings for more ids than there are tokens, and not equally
    many. Ids that the trained model lacks are cut off: the second model then samples from the rest.
    """
    refuse_other_vocabulary(second.tokenizer, trained.tokenizer, name=second.name)
    num_needed = 1 + max(trained.tokenizer.get_vocab().values())
    num_own, num_trained = _num_embeddings(second), _num_embeddings(trained)
    if num_own < num_needed:
        raise ConfigError(
            f"The second policy {second.name!r} has embeddings for {num_own} ids, but its "
            f"tokenizer has {num_needed}: choose a checkpoint that fits its tokenizer."
        )
    if num_own < min(top_logprobs, num_trained):
        raise ConfigError(
            f"rollout.top_logprobs = {top_logprobs} is more than the {num_own} ids of the second "
            f"policy {second.name!r}: lower it to {num_own}."
        )
    if num_own > num_trained:
        second.model.resize_token_embeddings(num_trained)
    second.tokenizer = trained.tokenizer  # texts are decoded alike


def refuse_other_vocabulary(
    second: PreTrainedTokenizerBase, trained: PreTrainedTokenizerBase, *, name: str
) -> None:
    """Refuse a tokenizer in which any token, special ones included, has another id or none."""
    own, wanted = second.get_vocab(), trained.get_vocab()
    if own == wanted:
        return
    differing = {token for token, _ in own.items() ^ wanted.items()}
    first = min(differing, key=lambda token: (wanted.get(token, own.get(token, 0)), token))
    raise ConfigError(
        f"The second policy {name!r} has another vocabulary than the trained model: choose a model "
        f"with the same tokenizer ({first!r} is {_id(own, first)} there and {_id(wanted, first)} "
        f"here, the first of {len(differing)} that differ)."
    )


def _num_embeddings(policy: Policy) -> int:
    return int(policy.model.get_output_embeddings().weight.shape[0])


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "absent"
