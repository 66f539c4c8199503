"""The GPU benchmarks run to their end at tiny sizes, and count operations as torch does."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTH = 64


@pytest.fixture(scope="module")
def scripts() -> Any:
    """Import the benchmarks as their own folder sees them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import memory_gpu  # pyright: ignore[reportMissingImports]
        import qwen3_shapes  # pyright: ignore[reportMissingImports]
        import step_gpu  # pyright: ignore[reportMissingImports]
        import step_profile  # pyright: ignore[reportMissingImports]
        import train_flops  # pyright: ignore[reportMissingImports]
        import train_gpu  # pyright: ignore[reportMissingImports]
        import worker_process  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.remove(str(BENCHMARKS))
    return SimpleNamespace(
        memory=memory_gpu,
        step=step_gpu,
        profile=step_profile,
        train=train_gpu,
        flops=train_flops,
        shapes=qwen3_shapes,
        results=worker_process.Results,
    )


@pytest.fixture(scope="module")
def model(scripts: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    scripts.shapes.make_checkpoint(scripts.shapes.SHAPES["tiny"], folder, context=1024)
    return str(folder)


@pytest.fixture
def case(scripts: Any, model: str, tmp_path: Path) -> Any:
    return scripts.train.Case(
        shape="tiny",
        length=LENGTH,
        model=model,
        objectives=("p3o", "grpo"),
        tokens_per_step=4 * LENGTH,
        micro_batch_tokens=2 * LENGTH,
        warm_up=1,
        steps=1,
        overrides=(),
        peak_flops=1e12,
        output=str(tmp_path / "results.jsonl"),
        run="test",
    )


def test_the_trainer_alone(scripts: Any, case: Any) -> None:
    scripts.train.run_case(case)
    p3o, grpo = scripts.results(Path(case.output), "test").read()
    assert (p3o["objective"], grpo["objective"]) == ("p3o", "grpo")
    assert p3o["flops"]["model"] == grpo["flops"]["model"] > 0
    assert p3o["flops"]["pre_pass"] == p3o["flops"]["model"] / 3
    assert grpo["flops"]["pre_pass"] == 0
    assert p3o["tokens_per_second"] == 4 * LENGTH / p3o["seconds"][0]
    scripts.train.print_table([p3o, grpo])


def test_a_prompt_of_several_sequences_counts_for_each(scripts: Any, case: Any) -> None:
    shared = dataclasses.replace(
        case, objectives=("grpo",), longest_prompt=LENGTH // 2, samples=2, run="shared"
    )
    alone = dataclasses.replace(shared, samples=1, run="alone")
    for each in (shared, alone):
        scripts.train.run_case(each)
    (one,) = scripts.results(Path(case.output), "shared").read()
    (other,) = scripts.results(Path(case.output), "alone").read()
    assert one["flops"]["model"] == other["flops"]["model"]
    assert other["flops"]["shared"] == 0
    # of two sequences' 2 (L - 1) input tokens, one prompt of L / 2 is computed once
    assert one["share_computed"] == 1 - (LENGTH / 2) / (2 * (LENGTH - 1))
    assert one["hardware_utilization"] < one["mfu"]
    assert other["hardware_utilization"] == other["mfu"]


def test_graders_of_the_step_do_not_import_torch() -> None:
    code = "import sys, step_workload; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)


def test_the_step(scripts: Any, model: str, tmp_path: Path) -> None:
    work = scripts.step.Workload(
        framework="trustbatch",
        shape="tiny",
        model=model,
        prompts=2,
        samples=2,
        tokens=8,
        prompt_tokens=6,
        warm_up=1,
        steps=2,
        micro_batch_tokens=32,
        trl_batch=4,
        overrides=("training.learning_rate=1e-5",),
        trl_overrides=(),
        output=str(tmp_path / "results.jsonl"),
        run="test",
    )
    configs = [
        scripts.step.configure_trustbatch(dataclasses.replace(work, framework=name), "runs")
        for name in ("trustbatch", "trustbatch-kv8")
    ]
    assert [config.rollout.kv_precision for config in configs] == ["auto", "fp8"]
    scripts.step.run_trustbatch(work)
    lines = scripts.results(Path(work.output), "test").read()
    assert [line.get("is_timed") for line in lines] == [False, True, True, None]
    for step in lines[:3]:
        assert step["seconds"] == pytest.approx(step["generate"] + step["train"])
        assert step["details"]["gradient/norm"] > 0
    summary = scripts.step.summarize(lines, ["trustbatch", "trl"])
    assert summary["trustbatch"]["num_timed"] == 2
    scripts.step.print_summary(summary, "trustbatch")


@pytest.mark.parametrize("is_frozen", [False, True])
def test_operations_are_those_that_torch_counts(
    scripts: Any, case: Any, model: str, is_frozen: bool
) -> None:
    # eager attention: torch has no count for the fused one on a CPU, and counts what is masked
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    network.requires_grad_(not is_frozen)
    session = SimpleNamespace(
        policy=SimpleNamespace(model=network),
        config=SimpleNamespace(training=SimpleNamespace(micro_batch_tokens=LENGTH)),
    )
    case = dataclasses.replace(case, tokens_per_step=LENGTH)
    counted = scripts.flops.count_flops(case, session, has_pre_pass=False).model

    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    # a gradient reaches every layer, as adapters in all of them would have it
    embedded = network.get_input_embeddings()(ids).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        output = network(inputs_embeds=embedded, logits_to_keep=LENGTH - case.prompt_tokens)
        output.logits.sum().backward()
    shape = scripts.shapes.SHAPES["tiny"]
    masked = 3 * scripts.flops.attention_forward(shape, [LENGTH])
    norms = sum(each.numel() for each in network.parameters() if each.dim() == 1)
    elementwise = (4 if is_frozen else 6) * norms * LENGTH
    assert counter.get_total_flops() == counted + masked - elementwise


def test_a_step_is_profiled(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--shape", "tiny", "--prompts", "2", "--samples", "2", "--tokens", "8"]
    options = ["--warm-up", "1", "--micro-batch-tokens", "64", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["step_profile.py", *sizes, *options])
    scripts.profile.main()
    for phase in ("generate", "train"):
        assert "Self C" in (tmp_path / f"step_profile-{phase}.txt").read_text()


def test_gaps_between_kernels_that_overlap(scripts: Any) -> None:
    # busy from 10 to 15, from 18 to 40 and from 140 to 141
    spans = [(140.0, 141.0, "d"), (10.0, 15.0, "a"), (18.0, 40.0, "b"), (19.0, 22.0, "c")]
    busy, gaps = scripts.profile.gaps_of(spans)
    assert busy == 5 + 22 + 1
    assert [(gap.begin, gap.length, gap.before) for gap in gaps] == [(5, 3, "b"), (30, 100, "d")]
    assert scripts.profile.by_class(gaps) == {0: 0, 1: 3, 10: 0, 100: 100, 1000: 0, 10_000: 0}


def test_the_memory_of_a_limited_process(scripts: Any, tmp_path: Path) -> None:
    case = scripts.memory.CASES["tiny-limited"]
    scripts.shapes.make_outline(scripts.shapes.SHAPES["tiny"], tmp_path, context=4096)
    calls: list[dict[str, Any]] = []
    generate, train = scripts.memory.compare(
        "tiny-limited", case, str(tmp_path), steps=3, objective="grpo", note=calls.append
    )
    assert (generate["phase"], train["phase"]) == ("generate", "train")
    assert [(each["call"], each["number"]) for each in calls] == [
        ("load", 1),
        *((name, number) for number in (1, 2, 3) for name in ("generate", "train")),
    ]


def test_the_memory(scripts: Any, model: str) -> None:
    generate, train = scripts.memory.compare(
        "tiny", scripts.memory.CASES["tiny"], model, steps=2, objective="grpo"
    )
    assert (generate["phase"], train["phase"]) == ("generate", "train")
    for record in (generate, train):
        assert record["estimated_gib"] == pytest.approx(sum(record["parts_gib"].values()))
        assert ("allocated_gib" in record) == torch.cuda.is_available()
        assert scripts.memory.show(record).startswith("tiny ")
