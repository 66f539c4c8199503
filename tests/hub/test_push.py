"""`trustbatch push` with huggingface_hub's client, to a hub on this machine and to folders."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from tests.support.hub_server import TOKEN, Hub, running_hub
from transformers import AutoModelForCausalLM, AutoTokenizer

from trustbatch.cli import main
from trustbatch.hub.push import CONNECT_SECONDS, push

CONFIG = """
[model]
name = {model!r}
{lora}
[task]
name = "arithmetic"
level = 1
[rollout]
prompts_per_step = 2
samples_per_prompt = 2
max_tokens = 4
[training]
steps = 2
[evaluation]
every = 2
suite = ["arithmetic"]
prompts = 4
samples = 2
[run]
folder = {folder!r}
checkpoint_every = 1
"""


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two runs: `whole`, and `lora` with adapters."""
    folder = tmp_path_factory.mktemp("runs")
    for name, lora in (("whole", ""), ("lora", "[model.lora]\nrank = 2")):
        file = folder / f"{name}.toml"
        file.write_text(CONFIG.format(model=str(tiny_folder), lora=lora, folder=str(folder)))
        assert main(["train", str(file), f"--run.name={name}"]) == 0
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # files are uploaded by HTTP: the other protocol has a server of its own
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub() as hub:
        yield hub


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["push", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert TOKEN not in captured.err + captured.out
    return " ".join(captured.err.split())


def test_a_model_is_uploaded_and_can_be_loaded(
    runs: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["push", str(runs / "whole"), "me/sums", "--private", "--endpoint", hub.address]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert f"Pushed  {hub.address}/me/sums" in captured.out
    assert TOKEN not in captured.out + captured.err
    files = hub.repos["me/sums"]
    assert hub.private["me/sums"] is True
    assert hub.commits == ["Step 2, with trustbatch"]
    assert {"README.md", "trustbatch.toml", "config.json", "model.safetensors"} <= files.keys()
    # nothing of the trainer: no optimizer state, no rollouts
    assert not [name for name in files if "trainer" in name or "rank-" in name or "/" in name]
    assert TOKEN.encode() not in b"".join(files.values())
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    trained = AutoModelForCausalLM.from_pretrained(runs / "whole" / "checkpoints" / "step-2")
    for name, weight in trained.state_dict().items():
        assert torch.equal(loaded[name], weight), name
    AutoTokenizer.from_pretrained(tmp_path)
    assert not list((runs / "whole").glob(".push-*"))


def test_the_card_has_results_data_and_how_to_load(runs: Path, tmp_path: Path) -> None:
    pushed = push(runs / "whole", "me/sums", folder=tmp_path / "out")
    assert [name for name, _ in pushed.files] == sorted(
        p.name for p in (tmp_path / "out").iterdir()
    )
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["trustbatch", "reinforcement-learning", "p3o"]
    results = json.loads((runs / "whole/evaluations/step-000002/results.json").read_text())
    (score,) = results["scores"]
    evaluated = {each.metric_type: each.metric_value for each in card.data.eval_results or []}
    assert evaluated["mean_reward"] == round(score["mean_reward"], 4)
    assert evaluated["pass@1"] == round(score["pass_at_k"][0]["value"], 4)
    low, high = score["mean_reward_low"], score["mean_reward_high"]
    text = card.text
    assert f"{score['mean_reward']:.3f} ({low:.3f} to {high:.3f})" in text
    metrics = [json.loads(line) for line in (runs / "whole/metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in metrics if line["step"]]
    assert f"{rewards[0]:.3f} in the first step, {sum(rewards) / 2:.3f} over the last 2" in text
    assert "the task `arithmetic` with `level = 1`" in text
    assert 'AutoModelForCausalLM.from_pretrained("me/sums")' in text
    environment = json.loads((runs / "whole/environment.json").read_text())
    assert f"Commit: {environment['commit'] or 'not known'}." in text
    assert f"torch {environment['packages']['torch']}" in text
    assert "samples_per_prompt = 2" in text


def test_adapters_are_pushed_with_the_name_of_their_base(
    runs: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    words = [runs / "lora", "me/adapters", "--folder", tmp_path / "out"]
    message = error_of(capsys, *words)
    assert "which others can't load: name the same model on the hub with --base-model" in message
    assert main(["push", *map(str, words), "--base-model", "them/tiny"]) == 0
    out = tmp_path / "out"
    names = {file.name for file in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= names
    assert not names & {"model.safetensors", "config.json"}
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "them/tiny"
    )
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "them/tiny"
    assert card.data.library_name == "peft"
    assert 'PeftModel.from_pretrained(model, "me/adapters")' in card.text
    # on its base it computes what the checkpoint with merged weights does
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    adapted = peft.PeftModel.from_pretrained(base, out)
    merged = AutoModelForCausalLM.from_pretrained(runs / "lora" / "checkpoints" / "step-2")
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits)


def test_a_dry_run_writes_and_lists_the_files(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["push", str(runs / "whole"), "me/sums", "--dry-run", "--step", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    folder = runs / "whole" / "hub"
    size = (folder / "model.safetensors").stat().st_size
    assert f"{size:,}  model.safetensors" in out
    assert f"Written  {folder}" in out
    assert "1 of 2 steps" in (folder / "README.md").read_text()
    assert "is not empty: choose another --folder" in error_of(capsys, *words[1:])


def test_what_a_hub_refuses_is_one_sentence(
    runs: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, to = runs / "whole", ["--endpoint", hub.address]
    assert main(["push", str(run), "me/sums", *to]) == 0
    assert hub.private["me/sums"] is not True
    assert "me/sums exists already: choose another name" in error_of(capsys, run, "me/sums", *to)
    assert main(["push", str(run), "me/sums", *to, "--update"]) == 0
    assert len(hub.commits) == 2
    message = error_of(capsys, run, "them/sums", *to)
    assert message.startswith("error: The token may not write to them/sums: choose a name")
    hub.broken = True
    assert "status 400 (out of disk)" in error_of(capsys, run, "me/more", *to)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token" in error_of(capsys, run, "me/other", *to)


def test_no_token_no_network_and_offline(
    runs: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs / "whole"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    message = error_of(capsys, run, "me/a", "--endpoint", f"http://127.0.0.1:{port}")
    assert "can't be reached" in message
    assert "check the network and --endpoint" in message
    # a host that takes connections and never answers
    monkeypatch.setattr("trustbatch.hub.push.CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "can't be reached" in error_of(capsys, run, "me/a", "--endpoint", address)
        assert time.monotonic() - began < 60  # rather than for ever
    assert CONNECT_SECONDS <= 10
    assert "is no address" in error_of(capsys, run, "me/a", "--endpoint", "here")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("trustbatch.hub.push.get_token", lambda: None)  # none of this machine's
    message = error_of(capsys, run, "me/a", "--endpoint", hub.address)
    assert "There is no token for the hub: set HF_TOKEN, run `hf auth login`" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error_of(capsys, run, "me/a")
    assert not hub.repos


def test_wrong_inputs(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, to = runs / "whole", ["--folder", tmp_path / "out"]
    assert "is no run folder" in error_of(capsys, tmp_path, "me/a", *to)
    assert "no checkpoint of step 9: choose one of those it has (1, 2)" in error_of(
        capsys, run, "me/a", "--step", "9", *to
    )
    assert "is no name of a repository: write owner/model" in error_of(capsys, run, "a/b/c", *to)
    assert "has no results.json" in error_of(capsys, run, "a/b", "--evaluation", tmp_path, *to)
    assert not (tmp_path / "out").exists()
