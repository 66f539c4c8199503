"""Episodes: which tokens are sampled, by which policy, and when an episode ends."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.episode_cases import episodes, sampling_of
from tests.support.own_task import Chatter
from tests.support.training_cases import policy_logp
from transformers import GPT2Config, GPT2LMHeadModel

import trustbatch
from trustbatch.batching.sequences import to_sequences
from trustbatch.config import parse_config
from trustbatch.errors import ConfigError, ReplyError
from trustbatch.models.policy import Policy
from trustbatch.models.tiny import build_model, build_tokenizer
from trustbatch.observe.completion_log import readable_record
from trustbatch.observe.rollout_metrics import rollout_metrics
from trustbatch.observe.run_folder import read_metrics
from trustbatch.rewards import Scorer
from trustbatch.rollout.collect import collect
from trustbatch.rollout.mixture import MixedEngine, SecondPolicy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.native.portable_decoder import PortableDecoder
from trustbatch.rollout.records import group_from_record, group_to_record
from trustbatch.rollout.reply_tokens import ReplyEncoder
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Role,
    RolloutGroup,
    Turn,
)


def completions_of(groups: Sequence[RolloutGroup]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def same(one: Completion, other: Completion) -> bool:
    """Whether all tokens and turns are equal."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in Completion.__slots__]
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in pairs
    )


def test_an_episode_holds_what_was_said_in_order(policy: Policy) -> None:
    groups = episodes(policy)
    assert all([c.sample for c in group.completions] == [0, 1, 2, 3] for group in groups)
    found = completions_of(groups)
    assert {len(completion.turns) for completion in found} >= {1, 3, 5, 7}
    for completion in found:
        if len(completion.turns) == 1:
            assert completion.sampled is None
            continue
        assert completion.sampled is not None
        assert len(completion.sampled) == len(completion.token_ids)
        # runs of equal marks are the turns; a policy's ends with its stop token
        marks, lengths = completion.sampled.unique_consecutive(return_counts=True)
        assert marks.tolist() == [turn.role is Role.POLICY for turn in completion.turns]
        parts = completion.token_ids.split(lengths.tolist())
        assert policy.decode(parts) == [turn.text for turn in completion.turns]
        assert all(int(part[-1]) in policy.stop_token_ids for part in parts[:-1:2])
        assert completion.text == completion.turns[-1].text
        assert completion.num_sampled == sum(lengths[marks].tolist())
        environment = ~completion.sampled
        assert not completion.behavior_logp[environment].any()
        assert completion.behavior_top_logp is not None
        assert completion.behavior_top_logp.shape == (len(completion.token_ids), 4)


def test_every_turn_was_sampled_after_the_whole_conversation(policy: Policy) -> None:
    """The trainer sees the tokens in one pass, and finds the log-probs that the engine recorded."""
    groups = episodes(policy, temperature=1.0)
    sequences = to_sequences(groups, torch.zeros(6, 4))
    recorded = torch.cat([s.completion.of_policy(s.completion.behavior_logp) for s in sequences])
    torch.testing.assert_close(policy_logp(policy, sequences), recorded, rtol=0, atol=2e-5)


def test_episodes_do_not_depend_on_what_else_is_sampled(policy: Policy) -> None:
    together = episodes(policy)
    engine = NativeEngine(policy, seed=0, max_sequences=3)
    for number in range(6):
        (alone,) = episodes(policy, engine=engine, indices=[number])
        for one, other in zip(alone.completions, together[number].completions, strict=True):
            assert one.turns == other.turns
            assert one.token_ids.tolist() == other.token_ids.tolist()


def test_turns_have_random_numbers_of_their_own(policy: Policy) -> None:
    request = GenerationRequest(
        prompt_id="p",
        token_ids=(5, 6),
        num_samples=8,
        sampling=sampling_of(policy, temperature=100.0, max_tokens=9),
    )
    later = GenerationRequest(
        prompt_id="p", token_ids=(5, 6), num_samples=8, sampling=request.sampling, turn=1
    )
    engine = NativeEngine(policy, seed=0)
    first, second = (engine.generate([each]) for each in (request, later))
    assert all(
        a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(first, second, strict=True)
    )


class Listening(NativeEngine):
    """Records its requests."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.__dict__.setdefault("asked", []).append(list(requests))
        return super().generate(requests)


def test_every_turn_is_asked_for_once_by_its_number_and_all_of_them_together(
    policy: Policy,
) -> None:
    engine = Listening(policy, seed=0)
    found = completions_of(episodes(policy, engine=engine))
    calls: list[list[GenerationRequest]] = engine.__dict__["asked"]
    num_turns = [(len(completion.turns) + 1) // 2 for completion in found]
    assert len(calls) == max(num_turns)
    for turn, requests in enumerate(calls):
        assert {request.turn for request in requests} == {turn}
        assert sum(request.num_samples for request in requests) == sum(
            number > turn for number in num_turns
        )
        assert all(request.policy == (policy.name if turn else None) for request in requests)
        for request in requests:
            assert len(request.token_ids) + request.sampling.max_tokens <= 60 + 6


def test_requests_of_unequal_room_are_sampled_together_as_they_are_apart(policy: Policy) -> None:
    requests = [
        GenerationRequest(
            prompt_id=str(number),
            token_ids=tuple(policy.tokenizer.encode("12+34=")),
            num_samples=2,
            sampling=sampling_of(policy, max_tokens=number, temperature=1.0),
        )
        for number in (1, 3, 30, 7)
    ]
    engine = NativeEngine(policy, seed=0, max_sequences=6)
    together = engine.generate(requests)
    apart = [completion for request in requests for completion in engine.generate([request])]
    assert [c.token_ids.tolist() for c in together] == [c.token_ids.tolist() for c in apart]
    assert [c.finish_reason for c in together] == [c.finish_reason for c in apart]
    assert max(len(c.token_ids) for c in together) > 7


def test_rows_that_have_ended_do_not_leave_a_models_context(policy: Policy) -> None:
    """A table of positions has an end; a row without room runs on beside one that has some."""
    config = GPT2Config(
        vocab_size=len(policy.tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=2
    )
    config.eos_token_id = policy.stop_token_ids[0]
    model = GPT2LMHeadModel(config)
    other = Policy(model, policy.tokenizer, name="gpt2", precision="float32")
    engine = NativeEngine(other, seed=0)
    assert isinstance(engine._batch.decoder, PortableDecoder)
    requests = [
        GenerationRequest(
            prompt_id=str(length),
            token_ids=(5,) * length,
            num_samples=1,
            sampling=replace(sampling_of(other, max_tokens=32 - length), stop_token_ids=()),
        )
        for length in (2, 3, 4, 30)
    ]
    sampled = engine.generate(requests)
    assert [len(completion.token_ids) for completion in sampled] == [30, 29, 28, 2]


@pytest.mark.parametrize("max_turns", [1, 2, 4])
def test_the_last_turn_allowed_is_the_last(policy: Policy, max_turns: int) -> None:
    found = completions_of(episodes(policy, max_turns=max_turns))
    assert max(len(completion.turns) for completion in found) == 2 * max_turns - 1
    for completion in found:
        if completion.finish_reason is FinishReason.TURNS:
            assert len(completion.turns) == 2 * max_turns - 1
    reasons = {completion.finish_reason for completion in found}
    assert reasons >= {FinishReason.TURNS, FinishReason.STOP}


def test_an_episode_keeps_to_its_tokens(policy: Policy) -> None:
    """The environment's count too, and one that would leave no room for an answer is not added."""
    whole = completions_of(episodes(policy))
    for max_tokens in (1, 6, 9):
        found = completions_of(episodes(policy, max_tokens=max_tokens))
        assert any(completion.finish_reason is FinishReason.LENGTH for completion in found)
        for completion, longer in zip(found, whole, strict=True):
            length = len(completion.token_ids)
            assert length <= max_tokens
            assert completion.turns[-1].role is Role.POLICY
            assert completion.token_ids.tolist() == longer.token_ids[:length].tolist()
            if completion.finish_reason is FinishReason.STOP:
                assert length == len(longer.token_ids)


def test_without_an_answer_nothing_changes(policy: Policy) -> None:
    silent = episodes(policy, environment=Chatter(most_replies=0))
    prompts = [group.prompt for group in silent]
    engine = NativeEngine(policy, seed=0)
    plain = collect(engine, policy, prompts, task=None, num_samples=4, sampling=sampling_of(policy))
    for one, other in zip(completions_of(silent), completions_of(plain), strict=True):
        assert one.turns == (Turn(role=Role.POLICY, text=other.text),)
        assert other.turns == ()
        assert one.sampled is None
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.behavior_logp, other.behavior_logp)
        assert one.finish_reason == other.finish_reason


class Broken(Chatter):
    def __init__(self, answer: object) -> None:
        super().__init__()
        object.__setattr__(self, "answer", answer)

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        if isinstance(self.answer, Exception):  # type: ignore[attr-defined]
            raise self.answer  # type: ignore[attr-defined]
        return self.answer  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (KeyError("board"), "failed to reply on prompt '0' with KeyError: 'board'; fix it"),
        (7, "replied 7 on prompt '0': make `reply` return text"),
    ],
)
def test_a_broken_environment_is_named_with_the_prompt(
    policy: Policy, answer: object, sentence: str
) -> None:
    with pytest.raises(ReplyError) as error:
        episodes(policy, environment=Broken(answer))
    assert sentence in str(error.value)


def test_an_episode_is_sampled_by_one_policy_throughout(policy: Policy, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    other = Policy(build_model(tokenizer, seed=3), tokenizer, name="other", precision="float32")
    own = NativeEngine(policy, seed=0)
    second = SecondPolicy(
        name="other",
        engine=NativeEngine(other, seed=9),
        share=0.5,
        context_length=other.context_length,
        temperature=0.9,
    )
    groups = episodes(policy, engine=MixedEngine(own, [second]))
    alone = episodes(policy, engine=own)
    sequences = to_sequences(groups, torch.zeros(6, 4))
    for model, name in ((policy, policy.name), (other, "other")):
        sampled = [s for s in sequences if s.completion.provenance.policy == name]
        assert len(sampled) == 12
        assert max(len(s.completion.turns) for s in sampled) > 4
        assert {s.completion.provenance.temperature for s in sampled} == {
            0.9 if name == "other" else 1.5
        }
        # at their own temperatures only the likeliest token's rank is comparable: recompute
        for sequence in sampled:
            completion = sequence.completion
            ids = torch.tensor([[*sequence.prompt_token_ids, *completion.token_ids.tolist()]])
            with torch.no_grad():
                logits = model.model(input_ids=ids).logits[0, len(sequence.prompt_token_ids) - 1 :]
            logp = (logits[:-1] / completion.provenance.temperature).log_softmax(-1)
            taken = logp.gather(-1, completion.token_ids[:, None]).squeeze(-1)
            torch.testing.assert_close(
                completion.of_policy(taken),
                completion.of_policy(completion.behavior_logp),
                rtol=0,
                atol=2e-5,
            )
    # the trained policy's episodes are what they are without the other
    for mixed, plain in zip(groups, alone, strict=True):
        assert [c.turns for c in mixed.completions[:2]] == [c.turns for c in plain.completions[:2]]


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_base_models_reply_is_its_text(policy: Policy) -> None:
    encoder = ReplyEncoder.of(policy, {})
    assert encoder.encode(["12+"], prompt_id="p") == tuple(policy.tokenizer.encode("12+"))
    assert encoder.encode([""], prompt_id="p") == ()


def test_a_reply_without_tokens_is_named(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="can't encode prompt 'p': it has no token for some"):
        ReplyEncoder.of(policy, {}).encode(["é"], prompt_id="p")


def test_later_turns_have_the_prompts_arguments_of_the_template(policy: Policy) -> None:
    policy.tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}{{ '+' if enable_thinking else '-' }}{% endif %}"
    )

    class Thinking(Chatter):
        def prompt(self, index: int) -> Prompt:
            return replace(super().prompt(index), chat={"enable_thinking": index == 0})

    groups = episodes(policy, environment=Thinking(), indices=[0, 1], num_samples=8)
    for group, mark in zip(groups, "+-", strict=True):
        spoken = [c for c in group.completions if len(c.turns) > 1]
        assert spoken
        for completion in spoken:
            assert completion.sampled is not None
            replies = policy.tokenizer.decode(completion.token_ids[~completion.sampled])
            assert replies.endswith(mark)


def test_a_chat_models_reply_stands_in_its_template(policy: Policy) -> None:
    """What follows the policy's stop token, as if the whole conversation had been rendered."""
    policy.tokenizer.chat_template = CHATML.replace("<|im_end|>", "</s>")
    encoder = ReplyEncoder.of(policy, {})
    assert encoder.between == ("\n<|im_start|>user\n", "</s>\n<|im_start|>assistant\n")
    # a template in the tiny model's own characters
    policy.tokenizer.chat_template = (
        "{% for message in messages %}{{ '*' if message.role == 'user' else '-' }}"
        "{{ message.content }}</s>{% endfor %}{% if add_generation_prompt %}-{% endif %}"
    )
    prompt = policy.encode(Prompt(id="p", text="1+1=", answer=""))
    conversation = policy.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "0"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    sampled = policy.tokenizer.encode("3</s>")
    whole = (*prompt, *sampled, *ReplyEncoder.of(policy, {}).encode(["0"], prompt_id="p"))
    assert whole == tuple(policy.tokenizer.encode(conversation))
    (group, *_) = episodes(policy, indices=[0], num_samples=8)
    spoken = [c for c in group.completions if len(c.turns) > 1]
    assert spoken
    for completion in spoken:
        assert completion.sampled is not None
        reply = completion.token_ids[~completion.sampled].tolist()
        assert policy.tokenizer.decode(reply).startswith("*")


def test_a_template_without_a_past_is_refused(policy: Policy) -> None:
    policy.tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ConfigError, match=r"set rollout\.max_turns = 1"):
        ReplyEncoder.of(policy, {})


def test_records_of_episodes_lose_nothing(policy: Policy) -> None:
    for group in Scorer(Chatter()).score(episodes(policy)):
        record = json.loads(json.dumps(group_to_record(group)))
        restored = group_from_record(record)
        assert restored.grades == group.grades
        for one, other in zip(restored.completions, group.completions, strict=True):
            assert same(one, other)
            if other.sampled is not None:
                assert one.sampled is not None
                assert one.sampled.dtype == torch.bool


def test_readable_records_count_the_policys_tokens_and_name_the_speakers(policy: Policy) -> None:
    (group,) = Scorer(Chatter()).score(episodes(policy, indices=[0], num_samples=8))
    sample = max(range(8), key=lambda number: len(group.completions[number].turns))
    completion = group.completions[sample]
    assert completion.sampled is not None
    record = readable_record(group, sample, step=1, advantage=0.0)
    assert record["tokens"] == int(completion.sampled.sum())
    assert record["environment_tokens"] == int((~completion.sampled).sum())
    assert record["mean_behavior_logp"] == pytest.approx(
        float(completion.behavior_logp[completion.sampled].mean())
    )
    assert [turn["role"] for turn in record["turns"]][:2] == ["policy", "environment"]
    json.dumps(record)


def test_metrics_of_episodes_by_hand(policy: Policy) -> None:
    groups = Scorer(Chatter()).score(episodes(policy, max_tokens=20, max_turns=3))
    metrics = rollout_metrics(groups, policy=policy.name, version=0)
    found = completions_of(groups)
    turns = [(len(completion.turns) + 1) // 2 for completion in found]
    sampled = [c.num_sampled for c in found]
    assert metrics["episode/turns_mean"] == pytest.approx(sum(turns) / 24)
    assert metrics["episode/turns_max"] == 3.0
    stopped = [completion.finish_reason is FinishReason.STOP for completion in found]
    assert 0 < metrics["episode/ended_fraction"] == sum(stopped) / 24 < 1
    assert metrics["episode/sampled_tokens"] == sum(sampled)
    assert metrics["episode/environment_tokens"] == sum(
        len(completion.token_ids) for completion in found
    ) - sum(sampled)
    assert metrics["response/length_mean"] == pytest.approx(sum(sampled) / 24)
    assert metrics["response/length_max"] == max(sampled)
    plain = episodes(policy, environment=Chatter(most_replies=0))
    silent = rollout_metrics(Scorer(Chatter()).score(plain), policy=policy.name, version=0)
    assert silent["episode/environment_tokens"] == 0.0


def test_max_turns_reaches_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    assert (
        parse_config({"model": {"name": "m"}, "task": {"name": "arithmetic"}}).rollout.max_turns
        == 8
    )
    for max_turns in (1, 3):
        trustbatch.train(
            model={"name": str(tiny_folder), "device": "cpu"},
            task=Chatter(),
            rollout={"prompts_per_step": 3, "max_tokens": 40, "max_turns": max_turns},
            training={"steps": 1},
            run={"name": f"run-{max_turns}", "folder": str(tmp_path)},
        )
        (line,) = read_metrics(tmp_path / f"run-{max_turns}")
        assert line["episode/turns_max"] == max_turns
        assert line["tokens/count"] == line["episode/sampled_tokens"]
