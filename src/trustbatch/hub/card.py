"""The model card: what was trained from what, on which data, how good it is, and how to load it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from trustbatch.config import Config
from trustbatch.evaluation.report import results_table
from trustbatch.evaluation.results import EvaluationResults, TaskScores

NUM_LAST_STEPS = 5
"""whose rewards are averaged"""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Everything that a card says."""

    name: str
    """of the repository, such as owner/model"""
    config: Config
    step: int
    base_model: str | None
    metrics: Sequence[Mapping[str, Any]]
    evaluations: Sequence[EvaluationResults]
    environment: Mapping[str, Any]

    @property
    def is_adapter(self) -> bool:
        """Whether only adapters are in the repository."""
        return self.config.model.lora is not None


def model_card(facts: CardFacts) -> str:
    """Return the card: metadata in YAML, and the text in Markdown."""
    sections = [
        f"---\n{_metadata(facts).to_yaml()}\n---",
        f"# {facts.name.rpartition('/')[2]}",
        _summary(facts),
        f"## How to load it\n\n{_loading(facts)}",
        f"## Results\n\n{_results(facts)}",
        f"## Data\n\n{_data(facts.config)}",
        f"## Training\n\n{_training(facts)}",
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(facts: CardFacts) -> ModelCardData:
    evaluated = [
        EvalResult(
            task_type="text-generation",
            dataset_type=score.name,
            dataset_name=score.name,
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for results in facts.evaluations
        for score in results.scores
        for metric, value in _measured(score)
    ]
    return ModelCardData(
        base_model=facts.base_model,
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["trustbatch", "reinforcement-learning", facts.config.objective.name]
        + (["lora"] if facts.is_adapter else []),
        model_name=facts.name.rpartition("/")[2] if evaluated else None,
        eval_results=evaluated or None,
    )


def _measured(score: TaskScores) -> Iterator[tuple[str, float]]:
    if score.mean_reward is not None:
        yield "mean_reward", score.mean_reward
    if (first := score.at(1)) is not None:
        yield "pass@1", first.value


def _summary(facts: CardFacts) -> str:
    what = "LoRA adapters" if facts.is_adapter else "A language model"
    base = facts.base_model or facts.config.model.name
    return (
        f"{what} trained from `{base}` with reinforcement learning: objective "
        f"`{facts.config.objective.name}`, {facts.step} of {facts.config.training.steps} steps of "
        f"{facts.config.rollout.prompts_per_step} prompts x "
        f"{facts.config.rollout.samples_per_prompt} completions, with trustbatch."
    )


def _loading(facts: CardFacts) -> str:
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if facts.is_adapter:
        lines += [
            "from peft import PeftModel",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{facts.base_model}")',
            f'model = PeftModel.from_pretrained(model, "{facts.name}")',
        ]
    else:
        lines += ["", f'model = AutoModelForCausalLM.from_pretrained("{facts.name}")']
    lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}")')
    code = "\n".join(lines)
    return f"```python\n{code}\n```"


def _results(facts: CardFacts) -> str:
    parts = [_rewards(facts)]
    for results in facts.evaluations:
        table = results_table(results).strip()
        parts.append(table.replace("# ", "### ", 1))
    if not facts.evaluations:
        parts.append("The model was not evaluated on held-out problems.")
    return "\n\n".join(parts)


def _rewards(facts: CardFacts) -> str:
    rewards = [
        line["reward/mean"]
        for line in facts.metrics
        if 0 < line["step"] <= facts.step and line.get("reward/mean") is not None
    ]
    if not rewards:
        return "No step had a graded completion."
    last = rewards[-NUM_LAST_STEPS:]
    return (
        f"Mean reward in training: {rewards[0]:.3f} in the first step, "
        f"{sum(last) / len(last):.3f} over the last {len(last)} steps up to step {facts.step}."
    )


def _data(config: Config) -> str:
    lines = [f"Trained on the task `{config.task.name}`{_options(config.task.options)}."]
    if config.evaluation.every:
        names = ", ".join(f"`{entry.name}`" for entry in config.evaluation.suite)
        lines.append(f"Evaluated during training on {names}.")
    return " ".join(lines)


def _options(options: Mapping[str, Any]) -> str:
    shown = ", ".join(f"`{name} = {value!r}`" for name, value in options.items())
    return f" with {shown}" if shown else ""


def _training(facts: CardFacts) -> str:
    packages = facts.environment.get("packages", {})
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    lines = [
        f"Versions: {versions or 'not known'}.",
        f"Commit: {facts.environment.get('commit') or 'not known'}.",
        f"GPUs: {', '.join(facts.environment.get('gpus', [])) or 'none'}.",
    ]
    return (
        "\n".join(f"- {line}" for line in lines)
        + "\n\nThe whole configuration, which `trustbatch train` takes as it is, is also in "
        f"`trustbatch.toml`:\n\n```toml\n{facts.config.to_toml().strip()}\n```"
    )
