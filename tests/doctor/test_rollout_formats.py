"""Every format of recorded rollouts is read alike; what can't be read is named by line."""

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.text_model import save_text_model

import trustbatch
from trustbatch.doctor.rollouts.diagnose import diagnose_rollouts
from trustbatch.doctor.rollouts.read_file import RolloutFile, read_rollouts
from trustbatch.doctor.rollouts.recorded import RecordedSettings
from trustbatch.doctor.rollouts.token_strings import TokenStrings
from trustbatch.doctor.verdict import Status
from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import GenerationRequest, SamplingParams

Record = dict[str, Any]
PROMPTS = ("She sells", "The answer is", "def add(a, b):", "A cafe owner", "the sea shore", "12")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = save_text_model(tmp_path_factory.mktemp("models") / "text")
    return Policy.load(str(folder), device="cpu", precision="float32")


@pytest.fixture(scope="module")
def plain(policy: Policy) -> list[Record]:
    """Completions of a chat, in the package's own format."""
    tokenizer = policy.tokenizer
    records: list[Record] = []
    for number, prompt in enumerate(PROMPTS):
        messages = [{"role": "user", "content": prompt}]
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        request = GenerationRequest(
            prompt_id=str(number),
            token_ids=tuple(tokenizer.encode(str(rendered), add_special_tokens=False)),
            num_samples=12,
            sampling=SamplingParams(
                max_tokens=16, stop_token_ids=policy.stop_token_ids, temperature=0.8
            ),
        )
        records += [
            {
                "prompt_token_ids": list(request.token_ids),
                "messages": messages,
                "token_ids": completion.token_ids.tolist(),
                "logprobs": completion.behavior_logp.tolist(),
                "text": completion.text,
                "temperature": 0.8,
            }
            for completion in NativeEngine(policy, seed=0).generate([request])
        ]
    return records


def as_plain(record: Record, policy: Policy) -> Record:
    return record


def as_vllm(record: Record, policy: Policy) -> Record:
    """As `dataclasses.asdict` writes the outputs of `LLM.generate`."""
    positions = [
        {"999": {"logprob": -0.01, "rank": 1}, str(token): {"logprob": logp, "rank": 2}}
        for token, logp in zip(record["token_ids"], record["logprobs"], strict=True)
    ]
    output = {"index": 0, "text": record["text"], "token_ids": record["token_ids"]}
    return {
        "request_id": "7",
        "prompt": None,
        "prompt_token_ids": record["prompt_token_ids"],
        "outputs": [output | {"logprobs": positions}],
        "sampling_params": {"temperature": 0.8, "top_k": -1},
    }


@lru_cache
def token_bytes(policy: Policy) -> dict[int, bytes]:
    strings = TokenStrings(policy.tokenizer)
    return {token: content for content, ids in strings._ids.items() for token in ids}


def as_chat(record: Record, policy: Policy) -> Record:
    """As an API answers: strings and bytes, and neither ids nor settings in the response."""
    content = []
    for token, logp in zip(record["token_ids"], record["logprobs"], strict=True):
        written = token_bytes(policy)[token]
        shown = written.decode("utf-8", errors="replace")
        content.append({"token": shown, "logprob": logp, "bytes": list(written)})
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": record["text"]},
        "logprobs": {"content": content},
    }
    return {
        "request": {"messages": record["messages"], "temperature": 0.8},
        "response": {"object": "chat.completion", "model": "text", "choices": [choice]},
    }


def as_completions(record: Record, policy: Policy) -> Record:
    """As `vllm serve` answers with return_tokens_as_token_ids, in a batch file."""
    choice = {
        "index": 0,
        "text": record["text"],
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in record["token_ids"]],
            "token_logprobs": record["logprobs"],
        },
        "prompt_token_ids": record["prompt_token_ids"],
    }
    return {
        "custom_id": "7",
        "temperature": 0.8,
        "response": {"body": {"object": "text_completion", "choices": [choice]}},
    }


FORMATS = {
    "plain": as_plain,
    "vllm": as_vllm,
    "chat": as_chat,
    "completions": as_completions,
}


def write(file: Path, records: list[Record]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def read(file: Path) -> RolloutFile:
    return read_rollouts(file, num_tokens=10**6, stated=RecordedSettings(), say=lambda _: None)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_examined_alike(
    policy: Policy, plain: list[Record], tmp_path: Path, name: str
) -> None:
    records = [FORMATS[name](record, policy) for record in plain]
    file = write(tmp_path / "file.jsonl.gz", records)
    diagnosis = diagnose_rollouts(file, policy)
    examined = diagnosis.examination
    assert examined.file_format == name
    assert examined.settings.temperature == 0.8
    assert diagnosis.verdict.is_on_policy, diagnosis.verdict.sentences
    assert examined.sampling.total.mean_abs < 1e-5
    assert (examined.preparation.ids_from_strings > 0) == (name == "chat")
    assert examined.num_sequences == len(plain) == examined.num_completions


def test_what_had_to_be_recovered_is_said(
    policy: Policy, plain: list[Record], tmp_path: Path
) -> None:
    file = write(tmp_path / "file", [as_chat(record, policy) for record in plain])
    said = " ".join(diagnose_rollouts(file, policy).verdict.sentences)
    assert "recovered from the strings of their tokens" in said
    assert "made by this model's tokenizer and chat template" in said


def test_a_token_that_is_part_of_a_character_can_not_be_recovered(
    policy: Policy, plain: list[Record], tmp_path: Path
) -> None:
    """Engines write it as a replacement character, in the bytes too."""
    records = [as_chat(record, policy) for record in plain]
    broken = 0
    for record in records:
        for token in record["response"]["choices"][0]["logprobs"]["content"]:
            if "\N{REPLACEMENT CHARACTER}" in token["token"]:
                token["bytes"] = list(token["token"].encode())
                broken += 1
    assert broken, "the vocabulary has parts of characters"
    diagnosis = diagnose_rollouts(write(tmp_path / "file", records), policy)
    unrecovered = diagnosis.examination.preparation.unrecovered
    assert 0 < len(unrecovered) < len(plain)
    said = " ".join(diagnosis.verdict.sentences)
    assert "part of a character and has no id" in said
    assert diagnosis.verdict.is_on_policy, said


def test_the_log_of_a_run_is_read(tiny_folder: Path, tmp_path: Path) -> None:
    result = trustbatch.train(
        model={"name": str(tiny_folder), "device": "cpu"},
        task={"name": "arithmetic", "level": 1},
        rollout={"prompts_per_step": 8, "samples_per_prompt": 8, "max_tokens": 8},
        training={"steps": 1},
        run={"folder": str(tmp_path), "rollouts_logged": 64},
    )
    file = result.folder / "rollouts" / "step-000001.jsonl.gz"
    sampled_by = Policy.load(str(tiny_folder), device="cpu")
    diagnosis = diagnose_rollouts(file, sampled_by)
    assert diagnosis.examination.file_format == "logged"
    assert diagnosis.verdict.is_on_policy, diagnosis.verdict.sentences
    assert diagnosis.examination.num_sequences == 64


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"token_ids": "5 6"}, "Line 2 .* no usable 'token_ids'"),
        ({"logprobs": ["a"]}, "Line 2 .* no usable 'logprobs'"),
        ({"temperature": "hot"}, "Line 2 .* 'temperature' that is not a number"),
        ({"text": 5}, "Line 2 .* 'text' that is not text"),
        ({"sampling_params": []}, "Line 2 .* 'sampling_params' that is not an object"),
        ({"outputs": []}, "Line 2 .* another format than the first one"),
        ({"prompt_token_ids": None, "messages": None}, "Line 2 .* has no prompt"),
    ],
)
def test_a_wrong_field_is_named(
    plain: list[Record], tmp_path: Path, change: Record, sentence: str
) -> None:
    file = write(tmp_path / "file", [plain[0], plain[1] | change])
    with pytest.raises(ConfigError, match=sentence):
        read(file)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has no completion with tokens"),
        (b"{\n}", "Line 1 .* is not JSON: write one object per line"),
        (b"[1]\n", "Line 1 .* not a JSON object"),
        (b'{"a": 1}\n', "Line 1 .* no format that is known.*found 'a'"),
        (b"\xff\xfe\n", "can't be read"),
        (b'{"choices": []}', "Line 1 .* no usable 'choices'"),
        (b'{"choices": [{"message": {}}], "messages": []}', "Line 1 .*logprobs = true"),
    ],
)
def test_an_unreadable_file_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        read(file)


def test_a_missing_or_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read(tmp_path / "none")
    damaged = tmp_path / "file.gz"
    damaged.write_bytes(gzip.compress(b'{"token_ids": []}')[:12])
    with pytest.raises(ConfigError, match="can't be read"):
        read(damaged)


def test_greedy_rollouts_are_refused(policy: Policy, plain: list[Record], tmp_path: Path) -> None:
    file = write(tmp_path / "file", [record | {"temperature": 0} for record in plain])
    with pytest.raises(ConfigError, match="sampled at temperature 0"):
        diagnose_rollouts(file, policy)


RECORDED = Path(__file__).parents[1] / "data" / "recorded"
"""what vLLM 0.32's CPU build returned for the same model: `LLM.generate`, and its API server"""


@pytest.mark.parametrize("name", ["served-completions", "served-chat", "served-chat-without-ids"])
def test_responses_of_a_real_server(policy: Policy, name: str) -> None:
    diagnosis = diagnose_rollouts(RECORDED / f"{name}.jsonl.gz", policy)
    examined = diagnosis.examination
    assert diagnosis.verdict.is_on_policy, diagnosis.verdict.sentences
    assert examined.sampling.total.mean_abs < 1e-5
    assert examined.num_completions == 16
    if name == "served-chat-without-ids":
        assert 0 < examined.preparation.ids_from_strings < 16, "some have parts of characters"
    else:
        assert examined.preparation.ids_from_strings == 0
        assert examined.preparation.prompts_from_text == 0
        assert examined.texts.num_prompts == examined.num_sequences == 16


def test_what_a_real_engine_generated_in_bfloat16(policy: Policy) -> None:
    diagnosis = diagnose_rollouts(RECORDED / "generate-bfloat16.jsonl.gz", policy)
    assert diagnosis.verdict.causes(Status.FAULT) == []
    assert diagnosis.verdict.causes(Status.CONFIGURED) == ["precision"]
    arithmetic = diagnosis.examination.arithmetic
    assert arithmetic.explained_by == "bfloat16"
    assert diagnosis.examination.num_tokens > 1000
