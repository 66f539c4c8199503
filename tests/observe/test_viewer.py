"""The data of the completion viewer: read from any file, bounded, and safe inside of a page."""

import base64
import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from trustbatch.observe import viewer
from trustbatch.observe.charts import embedded_json
from trustbatch.observe.report_data import Run, read_rollouts, read_runs
from trustbatch.observe.viewer import ViewerData

HOSTILE = "</script><!-- <img src=x onerror=alert(1)> & \u2028\u2029 \ud800 \u202e \x00"
LISTS: dict[str, Any] = {
    "token": ["4", "2", "<eos>"],
    "token_id": [4, 2, 0],
    "behavior_logp": [-0.5, None, -0.1234567],
    "ratio": [1.0, None, 1.0000123],
}


def record(step: int = 1, prompt: str = "p0", sample: int = 0, **more: Any) -> dict[str, Any]:
    found = {"step": step, "prompt_id": prompt, "sample": sample, "prompt": "6*7=", "answer": "42"}
    found |= {"completion": "42", "reward": 1.0, "advantage": 0.5, "finish_reason": "stop"}
    return found | {"tokens": 3, "policy": "tiny", "version": 0, "engine": "native"} | more


def lines(*records: dict[str, Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in records).encode()


def run_of(folder: Path, files: dict[str, bytes]) -> Run:
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    for name, content in files.items():
        (folder / "rollouts" / name).write_bytes(content)
    return read_runs([folder])[0]


def unpack(packed: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_files_are_found_in_the_order_of_their_steps(tmp_path: Path) -> None:
    names = ["step-000010.jsonl.gz", "step-999999.jsonl", "step-1000000.jsonl.gz"]
    (tmp_path / "a" / "rollouts" / "step-000011.jsonl").mkdir(parents=True)
    run = run_of(tmp_path / "a", dict.fromkeys([*names, "step-000010.jsonl", "notes.txt"], b""))
    assert [path.name for path in run.rollout_files] == names


def test_plain_and_compressed_files_have_the_same_rows(tmp_path: Path) -> None:
    content = lines(record(), record(sample=1, completion="one\u2028two"))
    whole = gzip.compress(content)
    # a file that was appended to has a member for each part
    first, rest = content.split(b"\n", 1)
    members = gzip.compress(first + b"\n") + gzip.compress(rest)
    files = {"step-1.jsonl": content, "step-2.jsonl.gz": whole, "step-3.jsonl.gz": members}
    run = run_of(tmp_path / "a", files)
    read = [read_rollouts(path) for path in run.rollout_files]
    assert len(read[0]) == 2
    assert read[0] == read[1] == read[2]


def test_incomplete_and_damaged_files_give_what_can_be_read(tmp_path: Path) -> None:
    # random text does not compress, so that the file has many blocks
    many = [record(sample=place, completion=f"{hash((place, 1)):x}" * 9) for place in range(4000)]
    whole = gzip.compress(lines(*many))
    damaged = bytearray(whole)
    damaged[len(whole) * 3 // 4 :] = b"\xff" * 1000
    ends = {"cut": whole[: len(whole) // 2], "damaged": bytes(damaged)}
    ends |= {"empty": b"", "header": whole[:5], "text": b"no gzip at all"}
    for name, content in ends.items():
        path = tmp_path / f"step-{name}.jsonl.gz"
        path.write_bytes(content)
        read = read_rollouts(path)
        if name != "damaged":
            assert read == many[: len(read)]
        assert read[:1000] == many[: min(len(read), 1000)]
        assert (len(read) > 1000) == (name in ("cut", "damaged")), name
    assert read_rollouts(tmp_path / "step-gone.jsonl.gz") == []
    plain = tmp_path / "step-5.jsonl"
    plain.write_bytes(lines(record()) + '{"completion": "é'.encode()[:-1])
    assert read_rollouts(plain) == [record()]


def test_rows_refer_to_what_they_share(tmp_path: Path) -> None:
    files = {
        "step-1.jsonl": lines(record(), record(sample=1, reward=0.0), record(prompt="p1")),
        "step-2.jsonl": lines(record(2, version=1, model_prompt="<s>6*7=")),
    }
    old = run_of(tmp_path / "a", files)
    new = run_of(tmp_path / "b", {"step-1.jsonl.gz": gzip.compress(lines(record() | LISTS))})
    found = ViewerData.of([old, new]).columns()
    assert found["runs"] == ["a", "b"]
    assert [group["run"] for group in found["groups"]] == [0, 0, 0, 1]
    assert [group["step"] for group in found["groups"]] == [1, 1, 2, 1]
    assert [group["model_prompt"] for group in found["groups"]] == [None, None, "<s>6*7=", None]
    columns = found["columns"]
    assert columns["group"] == [0, 0, 1, 2, 3]
    assert columns["sample"] == [0, 1, 0, 0, 0]
    assert columns["reward"] == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert columns["source"] == [0, 0, 0, 1, 0]
    assert [source["version"] for source in found["sources"]] == [0, 1]
    assert ["tokens" in group for group in found["groups"]] == [False, False, False, True]


def test_token_lists_keep_five_digits_and_their_gaps(tmp_path: Path) -> None:
    bad = {"kl": [1.0], "entropy": "high", "weight": [float("nan"), float("inf"), 1e400]}
    rows = [record() | LISTS | bad, record(sample=1), record(sample=2) | {"token": "42"}]
    (group,) = ViewerData.of([run_of(tmp_path / "a", {"step-1.jsonl": lines(*rows)})]).groups
    first, second, third = unpack(group["tokens"])
    assert first == {
        **LISTS,
        "behavior_logp": [-0.5, None, -0.12346],
        "ratio": [1.0, None, 1.0],
        "weight": [None, None, None],
    }
    assert second is third is None


def test_bounds_are_spent_evenly_over_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        f"step-{step:02d}.jsonl": lines(
            *(record(step, f"p{place}", i) | LISTS for place in range(4) for i in range(2))
        )
        for step in range(1, 41)
    }
    run = run_of(tmp_path / "a", files)
    everything = ViewerData.of([run])
    assert len(everything.rows) == everything.num_with_tokens == 40 * 4 * 2
    assert everything.extent() == ("All 320 recorded completions. Choose one to read its tokens.")
    # a quarter of the texts: a group of each step; and a tenth of those with tokens
    monkeypatch.setattr(viewer, "TEXT_BYTES", everything.text_bytes // 4)
    monkeypatch.setattr(viewer, "TOKEN_BYTES", everything.token_bytes // 40)
    some = ViewerData.of([run])
    assert some.text_bytes <= viewer.TEXT_BYTES
    assert some.token_bytes <= viewer.TOKEN_BYTES
    steps = [group["step"] for group in some.groups]
    assert len(set(steps)) >= 38
    assert all(steps.count(step) <= 2 for step in steps)
    with_tokens = [group["step"] for group in some.groups if "tokens" in group]
    assert len(with_tokens) == 4
    gaps = [later - earlier for earlier, later in pairwise(with_tokens)]
    assert all(8 <= gap <= 12 for gap in gaps), with_tokens
    assert re.fullmatch(
        r"\d+ of 320 recorded completions, spread evenly over the steps \(the others are in the "
        r"run's rollouts folder\); the page holds the token lists of 8 out of \d+, spread evenly "
        r"over the steps\. Choose one to read its tokens\.",
        some.extent(),
    )


def test_what_is_embedded_is_ascii_and_ends_no_element() -> None:
    made = embedded_json({HOSTILE: [HOSTILE]})
    inner = made.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert inner.isascii()
    assert not set("<>&\x00") & set(inner)
    assert json.loads(inner) == {HOSTILE: [HOSTILE]}


@pytest.mark.parametrize("value", [HOSTILE, 1e400, None, [], {}, {"a": 1}, True, 10**400, -(2**60)])
def test_values_of_any_kind_give_a_page(tmp_path: Path, value: Any) -> None:
    row = dict.fromkeys([*record(), *LISTS, "parts", "turns", "model_prompt", "ungraded"], value)
    lists = {key: [value, value, 1.0] for key in LISTS}
    run = run_of(
        tmp_path / "a", {"step-1.jsonl": lines(row, lists, {"turns": [{"role": value}, value]})}
    )
    part = viewer.viewer([run])
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', part)
    assert len(json.loads(data)["columns"]["group"]) == 3


def test_the_page_about_completions_names_every_column() -> None:
    page = (Path(__file__).parents[2] / "docs" / "completions.md").read_text(encoding="utf-8")
    columns = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    shown = {"token", *viewer.TOKEN_NUMBERS, *viewer._ROW_NUMBERS, *viewer._SOURCE}
    shown |= {"step", "prompt_id", "prompt", "model_prompt", "completion", "answer"}
    assert shown | {"parts", "turns", "ungraded", "finish_reason"} <= set(
        re.findall(r"`(\w+)`", columns)
    )
