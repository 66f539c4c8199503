"""Faults planted into rollouts of a real engine are named; what is healthy is left in peace."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.text_model import CORPUS, save_text_model

from trustbatch.cli import main
from trustbatch.doctor.arithmetic import _matching_precision
from trustbatch.doctor.diagnose import Diagnosis
from trustbatch.doctor.distributions import Mismatch, SamplingDistribution
from trustbatch.doctor.rollouts.alignment import prepare
from trustbatch.doctor.rollouts.diagnose import diagnose_rollouts
from trustbatch.doctor.rollouts.recorded import RecordedRollout
from trustbatch.doctor.verdict import Status
from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import GenerationRequest, SamplingParams

Record = dict[str, Any]
SIZES = {"bfloat16": 0.02, "fp8": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("models") / "text")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load(folder)


def load(folder: Path, precision: str = "float32") -> Policy:
    return Policy.load(str(folder), device="cpu", precision=precision)


@dataclass(frozen=True)
class Rollouts:
    """Lines of a file in the package's own format."""

    records: list[Record]

    @classmethod
    def of(
        cls, policy: Policy, *, num: int = 64, precision: str = "auto", **sampling: Any
    ) -> "Rollouts":
        """Sample with the native engine; what is recorded is what was used."""
        tokenizer = policy.tokenizer
        words = " ".join(CORPUS).split()
        prompts = [" ".join(words[n % len(words) :][:4]) for n in range(num)]
        params = SamplingParams(max_tokens=24, stop_token_ids=policy.stop_token_ids, **sampling)
        requests = [
            GenerationRequest(
                prompt_id=str(number),
                token_ids=tuple(tokenizer.encode(prompt)),
                num_samples=1,
                sampling=params,
            )
            for number, prompt in enumerate(prompts)
        ]
        completions = NativeEngine(policy, seed=0, precision=precision).generate(requests)
        return cls(
            [
                {
                    "prompt": prompt,
                    "prompt_token_ids": list(request.token_ids),
                    "token_ids": completion.token_ids.tolist(),
                    "logprobs": completion.behavior_logp.tolist(),
                    "text": completion.text,
                    "sampling_params": {
                        "temperature": params.temperature,
                        "top_p": params.top_p,
                        "top_k": params.top_k or -1,
                    },
                }
                for prompt, request, completion in zip(prompts, requests, completions, strict=True)
            ]
        )

    def each(self, change: Callable[[Record], Record]) -> "Rollouts":
        """Change every line."""
        return Rollouts([change(dict(record)) for record in self.records])

    def stating(self, **settings: float) -> "Rollouts":
        """State other settings than those that were used."""
        return self.each(
            lambda record: record | {"sampling_params": record["sampling_params"] | settings}
        )

    def diagnose(self, model: Policy, file: Path, **options: Any) -> Diagnosis:
        """Write the file and diagnose it."""
        write(file, self.records)
        return diagnose_rollouts(file, model, device="cpu", tokens=1500, **options)


def write(file: Path, records: Sequence[Record]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def causes(diagnosis: Diagnosis) -> tuple[set[str], set[str]]:
    verdict = diagnosis.verdict
    return set(verdict.causes(Status.FAULT)), set(verdict.causes(Status.CONFIGURED))


def words(diagnosis: Diagnosis) -> str:
    return " ".join(diagnosis.verdict.sentences)


def perturbed(folder: Path, scale: float, *, only: str = "") -> Policy:
    """The same model with all weights, or those of one layer, a little different."""
    other = load(folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in other.model.named_parameters():
            if only in name:
                parameter.mul_(1.0 + scale * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.fixture(scope="module")
def healthy(policy: Policy) -> Rollouts:
    return Rollouts.of(policy)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6}, {"temperature": 1.3}], ids=["1", "0.6", "1.3"]
)
def test_a_healthy_file_is_clean(policy: Policy, tmp_path: Path, sampling: dict[str, Any]) -> None:
    diagnosis = Rollouts.of(policy, **sampling).diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == (set(), set()), words(diagnosis)
    assert diagnosis.verdict.is_on_policy
    assert diagnosis.examination.num_tokens > 1000
    assert diagnosis.examination.sampling.total.mean_abs < 1e-5


def test_raw_logprobs_are_named(policy: Policy, tmp_path: Path) -> None:
    raw = Rollouts.of(policy, temperature=0.6, logprob_mode="raw")
    diagnosis = raw.diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"logprob_mode"}, set())
    assert "log-probs are those of T = 1, the tokens are sampled from T = 0.6" in words(diagnosis)


def test_another_temperature_than_the_stated_one_is_named(policy: Policy, tmp_path: Path) -> None:
    hot = Rollouts.of(policy, temperature=1.2).stating(temperature=1.0)
    diagnosis = hot.diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"temperature"}, set())
    assert "sampled at T = 1.2, but the stated temperature is 1" in words(diagnosis)


def test_another_temperature_in_raw_logprobs_is_named_too(policy: Policy, tmp_path: Path) -> None:
    """Every ratio is 1: the tokens alone give it away."""
    hot = Rollouts.of(policy, temperature=1.2, logprob_mode="raw").stating(temperature=1.0)
    diagnosis = hot.diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"temperature", "logprob_mode"}, set())
    assert diagnosis.examination.sampling.total.mean_abs < 1e-5


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"top_p": 0.9}, "sampled with top_p = 0.9, but all tokens is assumed, as no settings"),
        ({"top_k": 10}, "sampled with top_k = 10, but all tokens is assumed"),
    ],
)
def test_an_unrecorded_truncation_is_named(
    policy: Policy, tmp_path: Path, sampling: dict[str, Any], said: str
) -> None:
    silent = Rollouts.of(policy, **sampling).each(
        lambda record: {k: v for k, v in record.items() if k != "sampling_params"}
    )
    diagnosis = silent.diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"support"}, set())
    assert said in words(diagnosis)
    told = silent.diagnose(policy, tmp_path / "file", **sampling)
    assert causes(told) == (set(), {"support"}), "what is stated is no fault"


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_a_precision_is_told_from_wrong_weights(
    policy: Policy, tmp_path: Path, precision: str, states: bool
) -> None:
    rounded = Rollouts.of(policy, precision=precision)
    if states:
        rounded = rounded.each(lambda record: record | {"precision": precision})
    diagnosis = rounded.diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == (set(), {"precision"}), words(diagnosis)
    assert f"The engine computes in {precision}" in words(diagnosis)


def test_a_precision_at_a_temperature_that_is_not_stated(policy: Policy, tmp_path: Path) -> None:
    rounded = Rollouts.of(policy, precision="bfloat16", temperature=0.7).stating(temperature=1.0)
    diagnosis = rounded.diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"temperature"}, {"precision"}), words(diagnosis)


@pytest.mark.parametrize(
    ("scale", "only"),
    [(0.003, ""), (0.05, "layers.1.mlp.down_proj"), (0.5, "layers.0.self_attn.v_proj")],
    ids=["all a little", "one layer", "another layer"],
)
def test_wrong_weights_are_told_from_rounding(
    folder: Path, policy: Policy, tmp_path: Path, scale: float, only: str
) -> None:
    """Also where they differ by as much as bfloat16 or FP8 would: the errors are others."""
    diagnosis = Rollouts.of(perturbed(folder, scale, only=only)).diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"wrong_weights"}, set()), words(diagnosis)
    assert "engine samples from other weights" in words(diagnosis)


@pytest.mark.parametrize(
    ("size", "likeness", "declared", "found"),
    [
        (0.02, 0.3, "unknown", "bfloat16"),
        (0.02, 0.05, "unknown", None),  # weights that are off by as much as bfloat16 rounds
        (0.06, 0.3, "unknown", None),  # and by more
        (0.004, 0.3, "unknown", None),  # and by less
        (0.06, 0.7, "unknown", "bfloat16"),
        (0.05, 0.0, "bfloat16", "bfloat16"),
        (0.02, 0.3, "float32", None),
    ],
)
def test_errors_are_rounding_if_they_resemble_it(
    policy: Policy, size: float, likeness: float, declared: str, found: str | None
) -> None:
    rollouts = [
        RecordedRollout(
            line=1,
            token_ids=(5,) * 50,
            logprobs=(-1.0,) * 50,
            prompt_token_ids=(3,),
            precision=declared,
        )
    ] * 40
    tokens = prepare(policy, rollouts, SamplingDistribution()).tokens
    of_size = {name: Mismatch(1.0, 0.0, 0.0, value, value) for name, value in SIZES.items()}
    assert (
        _matching_precision(
            "float32",
            tokens,
            replace(of_size["bfloat16"], mean_abs=size),
            of_size,
            {"bfloat16": likeness, "fp8": 0.01},
        )
        == found
    )


def test_another_checkpoint_is_named(policy: Policy, tmp_path: Path) -> None:
    other = load(save_text_model(tmp_path / "other", seed=1))
    diagnosis = Rollouts.of(other).diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"wrong_weights"}, set())


def test_an_earlier_version_is_named_even_below_the_rounding(
    folder: Path, policy: Policy, tmp_path: Path
) -> None:
    """By a candidate: the engine computes in bfloat16, and the versions differ by less."""
    earlier = perturbed(folder, 0.0015)
    earlier.save(tmp_path / "earlier")
    other = perturbed(folder, 0.0015, only="layers.0")
    other.save(tmp_path / "unrelated")
    candidates = [str(tmp_path / "unrelated"), str(tmp_path / "earlier")]
    stale = Rollouts.of(earlier, precision="bfloat16")
    diagnosis = stale.diagnose(policy, tmp_path / "file", candidates=candidates)
    assert causes(diagnosis)[0] == {"stale_weights"}
    assert f"sampled by {tmp_path / 'earlier'}" in words(diagnosis)
    fresh = Rollouts.of(policy, precision="bfloat16")
    diagnosis = fresh.diagnose(policy, tmp_path / "file", candidates=candidates)
    assert causes(diagnosis) == (set(), {"precision"}), words(diagnosis)


def test_a_head_that_was_never_loaded_is_named(
    folder: Path, policy: Policy, tmp_path: Path
) -> None:
    tied = load(folder)
    with torch.no_grad():
        tied.model.lm_head.weight.copy_(tied.model.model.embed_tokens.weight)
    diagnosis = Rollouts.of(tied).diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"tied_head"}, set())
    assert "the engine never loaded lm_head" in words(diagnosis)


def test_ids_that_were_encoded_again_are_named(
    policy: Policy, healthy: Rollouts, tmp_path: Path
) -> None:
    """The text is the same; the ids are those that it encodes to."""
    tokenizer = policy.tokenizer

    def encode_again(record: Record) -> Record:
        whole = tokenizer.decode(record["token_ids"])
        ids = tokenizer.encode(whole, add_special_tokens=False)
        return record | {"token_ids": ids, "text": tokenizer.decode(ids)}

    again = healthy.each(encode_again)
    lengths = [len(r["token_ids"]) == len(r["logprobs"]) for r in again.records]
    assert any(lengths)
    assert not all(lengths)
    diagnosis = again.diagnose(policy, tmp_path / "file")
    assert "retokenized" in causes(diagnosis)[0]
    assert "never encode text again" in words(diagnosis)


def test_a_few_damaged_completions_are_not_blamed_on_the_weights(
    policy: Policy, healthy: Rollouts, tmp_path: Path
) -> None:
    records = [dict(record) for record in healthy.records]
    for number in (3, 17, 40):  # the engine saw a prompt of which two tokens are missing here
        records[number]["prompt_token_ids"] = records[number]["prompt_token_ids"][2:]
        del records[number]["prompt"]
    diagnosis = Rollouts(records).diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"retokenized"}, set())
    assert "(lines 4, 18, 41), while the others fit" in words(diagnosis)


@pytest.mark.parametrize("places", [-1, 1])
def test_logprobs_that_are_off_by_one_are_named(
    policy: Policy, healthy: Rollouts, tmp_path: Path, places: int
) -> None:
    def move(record: Record) -> Record:
        logprobs = record["logprobs"]
        moved = [-1.0, *logprobs[:-1]] if places > 0 else [*logprobs[1:], -1.0]
        return record | {"logprobs": moved}

    diagnosis = healthy.each(move).diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"shifted"}, set()), words(diagnosis)
    assert diagnosis.examination.shifted == -places


def test_a_missing_first_logprob_is_named(
    policy: Policy, healthy: Rollouts, tmp_path: Path
) -> None:
    short = healthy.each(lambda record: record | {"logprobs": record["logprobs"][1:]})
    assert causes(short.diagnose(policy, tmp_path / "file")) == ({"shifted"}, set())


@pytest.mark.parametrize(
    ("value", "cause"), [(float("nan"), "not_finite"), (None, "not_finite"), (0.5, "positive")]
)
def test_numbers_that_are_no_logprobs_are_named(
    policy: Policy, healthy: Rollouts, tmp_path: Path, value: float | None, cause: str
) -> None:
    records = [dict(record) for record in healthy.records]
    records[5]["logprobs"] = [value, *records[5]["logprobs"][1:]]
    diagnosis = Rollouts(records).diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({cause}, set())
    assert "(line 6)" in words(diagnosis)


def test_ids_of_another_text_are_named(policy: Policy, healthy: Rollouts, tmp_path: Path) -> None:
    mixed = healthy.each(dict)
    mixed.records[2]["text"] = "something else"
    diagnosis = mixed.diagnose(policy, tmp_path / "file")
    assert causes(diagnosis) == ({"retokenized"}, set())
    assert "(line 3; the ids say" in words(diagnosis)


def test_another_chat_template_is_named(policy: Policy, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "She sells"}]
    tokenizer = policy.tokenizer
    right = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    wrong = tokenizer.apply_chat_template(messages, tokenize=False)
    base = Rollouts.of(policy).records
    for rendered, expected in ((right, set()), (wrong, {"prompt"})):
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        params = SamplingParams(max_tokens=24, stop_token_ids=policy.stop_token_ids)
        request = GenerationRequest(
            prompt_id="chat", token_ids=tuple(ids), num_samples=32, sampling=params
        )
        records = [
            {
                **{k: v for k, v in base[0].items() if k != "prompt"},
                "messages": messages,
                "prompt_token_ids": ids,
                "token_ids": completion.token_ids.tolist(),
                "logprobs": completion.behavior_logp.tolist(),
                "text": completion.text,
            }
            for completion in NativeEngine(policy, seed=0).generate([request])
        ]
        diagnosis = Rollouts(records).diagnose(policy, tmp_path / "file")
        assert causes(diagnosis)[0] == expected, words(diagnosis)
    assert "as without add_generation_prompt" in words(diagnosis)


def test_the_command(
    folder: Path, healthy: Rollouts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rollouts.jsonl", healthy.records)
    common = ["doctor", "--rollouts", str(file), "--model", str(folder), "--device", "cpu"]
    assert main([*common, "--tokens", "600"]) == 0
    assert "On-policy up to the rounding of float32" in capsys.readouterr().out
    hot = write(file, healthy.stating(temperature=0.5).records)
    record = tmp_path / "verdict.json"
    assert main([*common, "--tokens", "1500", "--json", str(record)]) == 1
    read = json.loads(record.read_text())
    assert read["faults"] == ["temperature"]
    assert read["examination"]["settings"]["temperature"] == 0.5
    for arguments, sentence in (
        (["doctor", "--rollouts", str(hot)], "--rollouts needs --model"),
        (["doctor"], "Give the doctor a configuration"),
        ([*common, "--temprature", "1"], "did you mean '--temperature'?"),
        ([*common, "--seed", "1"], "Unknown with --rollouts: --seed"),
    ):
        assert main(arguments) == 2
        assert sentence in capsys.readouterr().err


def test_a_large_file_is_thinned_evenly(policy: Policy, healthy: Rollouts, tmp_path: Path) -> None:
    file = write(tmp_path / "file", healthy.records * 20)
    diagnosis = diagnose_rollouts(file, policy, tokens=1000)
    examined = diagnosis.examination
    assert examined.num_completions == 20 * 64
    assert 1000 <= examined.num_tokens <= 2100
    assert diagnosis.verdict.is_on_policy


def test_ids_that_the_model_does_not_know_are_refused(
    policy: Policy, healthy: Rollouts, tmp_path: Path
) -> None:
    foreign = healthy.each(lambda record: record | {"token_ids": [5000] * len(record["logprobs"])})
    with pytest.raises(ConfigError, match=r"Line 1 .* token id 5000, and .* knows 150 ids"):
        foreign.diagnose(policy, tmp_path / "file")
