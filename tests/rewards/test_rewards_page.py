"""The examples of docs/rewards.md work."""

import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from tests.test_docs import DOCS, TABLE_ROW, code_blocks, read

import trustbatch
from trustbatch.rewards.terms import TERMS

PAGE = DOCS / "rewards.md"


def test_the_first_reward_of_a_newcomer(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (function,) = code_blocks(PAGE, "python")
    table = tomllib.loads(code_blocks(PAGE, "toml")[0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(function)
    table["model"] = {"name": str(tiny_folder)}
    result = trustbatch.train(
        **table,
        rollout={"prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 4},
        training={"steps": 2},
    )
    for metrics in result.metrics:
        parts = metrics["reward/task/mean"] + 0.1 * metrics["reward/brevity/mean"]
        assert metrics["reward/mean"] == pytest.approx(parts)
        assert metrics["reward/brevity/mean"] > 0.0
        assert metrics["reward/failed"] == 0.0


def test_the_page_has_every_term_with_its_options() -> None:
    rows = dict(TABLE_ROW.findall(read(PAGE)))
    assert {name for name in rows if name in TERMS} == set(TERMS)
    for name, kind in TERMS.items():
        for field in fields(kind):
            if not field.init or field.name == "task":
                continue
            if field.default is MISSING:
                shown = "required"
            elif field.default is None:
                shown = "`rollout.max_tokens`" if field.name == "max_tokens" else "unset"
            else:
                shown = str(field.default).lower()
            assert f"`{field.name}` ({shown}" in rows[name], (name, field.name)
