"""The objectives in verl: its own registry, configuration, worker and FSDP engine, on the CPU."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from trustbatch.errors import ConfigError
from trustbatch.integrations.step_totals import padded_tokens
from trustbatch.objectives import OBJECTIVES, Objective, build_objective

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make test-verl"),
]
if find_spec("verl"):
    from hydra.errors import InstantiationException  # in which Hydra quotes the sentence
    from tests.support.verl_worker import Case, actor_config, settings
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.engine import BaseEngine
    from verl.workers.utils.losses import ppo_loss

    from trustbatch.integrations.verl import register_objective

    TRAINED = [
        *(Case(loss_mode="trustbatch_p3o", size=size) for size in (1, 2, 4)),
        Case(loss_mode="trustbatch_p3o", bypass=True),
        Case(loss_mode="p3o_k3", size=2),
        Case(loss_mode="trustbatch_m2po", size=2),
        Case(loss_mode="trustbatch_grpo", size=1),
        Case(loss_mode="trustbatch_gspo", size=2),
        Case(loss_mode="trustbatch_decoupled", size=4),
        Case(loss_mode="trustbatch_pact", size=2),
    ]
    REFUSED = {
        Case(
            loss_mode="trustbatch_p3o", without="rollout_log_probs"
        ): "actor_rollout_ref.rollout.calculate_log_probs=true",
        Case(
            loss_mode="trustbatch_decoupled", bypass=True
        ): "algorithm.rollout_correction.bypass_mode=false",
        Case(
            loss_mode="trustbatch_p3o", weighted=True
        ): "algorithm.rollout_correction.rollout_is=null",
    }
else:
    TRAINED, REFUSED = [], {}

PROMPT, RESPONSE = 4, 6


def make_batch(vocabulary: int) -> dict[str, Tensor]:
    """Eight sequences as verl pads them: prompts on the left, responses on the right."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.tensor([4, 2, 3, 1, 4, 3, 2, 4])[:, None]
    responses = torch.tensor([6, 3, 1, 6, 4, 2, 5, 6])[:, None]
    attends = torch.cat(
        [torch.arange(PROMPT) >= PROMPT - prompts, torch.arange(RESPONSE) < responses], dim=1
    ).long()
    sampled = attends[:, PROMPT:].clone()
    sampled[0, 2:4] = 0  # an environment's tokens
    tokens = torch.randint(4, vocabulary, attends.shape, generator=generator) * attends
    policy = torch.randn(len(tokens), RESPONSE, generator=generator)
    return {
        "input_ids": tokens,
        "prompts": tokens[:, :PROMPT].clone(),
        "responses": tokens[:, PROMPT:].clone(),
        "attention_mask": attends,
        "position_ids": (attends.cumsum(1) - 1).clamp(min=0),
        "response_mask": sampled,
        "rollout_log_probs": -3.0 + 0.5 * policy,
        "old_log_probs": -3.0 + 0.5 * policy + 0.2 * torch.randn(policy.shape, generator=generator),
        "advantages": torch.randn(len(tokens), 1, generator=generator).expand_as(policy).clone(),
    }


def response_logp(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """[sequences, response tokens], by the model's own forward pass."""
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
    ).logits
    logp = logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return logp.gather(-1, batch["responses"][..., None]).squeeze(-1)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def batch(model: Any) -> dict[str, Tensor]:
    return make_batch(model.config.vocab_size)


@pytest.fixture(scope="module")
def taken(
    tiny_folder: Path, batch: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Gradients and reports of all cases, by verl's worker on two ranks."""
    folder = tmp_path_factory.mktemp("verl")
    save_file(batch, folder / "batch.safetensors")
    cases = json.dumps([asdict(case) for case in [*TRAINED, *REFUSED]])
    files = [tiny_folder, folder / "batch.safetensors", cases, folder / "steps.safetensors"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "tests.support.verl_platform,tests.support.verl_losses",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # its FSDP engine is listed under accelerators alone
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [*launcher, "-m", "tests.support.verl_worker", *map(str, files)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    with safe_open(files[-1], framework="pt") as steps:
        gradients = {name: steps.get_tensor(name) for name in steps.keys()}  # noqa: SIM118
        return gradients, json.loads(steps.metadata()["reports"])


def objective_of(case: "Case") -> Objective:
    if case.loss_mode == "p3o_k3":
        return build_objective("p3o", kl="k3")
    return build_objective(case.loss_mode.removeprefix("trustbatch_"))


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_the_gradient_is_that_of_the_undivided_step(
    case: "Case", taken: Any, model: Any, batch: dict[str, Tensor]
) -> None:
    objective = objective_of(case)
    tokens = padded_tokens(
        logp=response_logp(model, batch),
        behavior_logp=batch["rollout_log_probs"],
        advantage=batch["advantages"],
        mask=batch["response_mask"],
        proximal_logp=batch["old_log_probs"],
    )
    model.zero_grad()
    objective(tokens, objective.totals(tokens)).loss.backward()
    expected = torch.cat([each.grad.flatten() for each in model.parameters()])
    gradient = taken[0][case.name]
    assert float(expected.norm()) > 0.1
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5


def test_the_reported_ess_is_that_of_the_whole_step(
    taken: Any, model: Any, batch: dict[str, Tensor]
) -> None:
    log_ratio = response_logp(model, batch).detach() - batch["rollout_log_probs"]
    ratio = log_ratio[batch["response_mask"].bool()].double().exp()
    expected = float(ratio.sum().square() / (len(ratio) * ratio.square().sum()))
    assert expected < 0.95  # an ESS of 1 would show nothing
    for case in TRAINED:
        report = taken[1][case.name]
        assert report["trustbatch/ess"] == pytest.approx(expected, abs=1e-5), case
        assert report["trustbatch/tokens/count"] == len(ratio)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_batch_that_an_objective_can_not_use_is_refused(case: "Case", taken: Any) -> None:
    assert REFUSED[case] in taken[1][case.name]


def test_verl_finds_the_losses_by_its_own_loader() -> None:
    """In a process that imports verl alone; one that only imports it does not load its engines."""
    code = (
        "import sys; from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as losses\n"
        "print(*[name for name in losses if name.startswith('trustbatch_')])\n"
        "print('verl.workers.engine' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    names, engines = done.stdout.splitlines()[-2:]
    assert names.split() == [f"trustbatch_{name}" for name in OBJECTIVES if name != "vcpo"]
    assert engines == "False"


def test_the_loss_is_named_in_verls_own_configuration() -> None:
    config = actor_config(*settings("model", "trustbatch_p3o"))
    assert config.policy_loss.loss_mode == "trustbatch_p3o"
    with pytest.raises(InstantiationException, match="loss_agg_mode at token-mean"):
        actor_config(
            *settings("model", "trustbatch_p3o"),
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        )
    with pytest.raises(InstantiationException, match="did you mean 'trustbatch_p3o'"):
        actor_config(*settings("model", "trustbatch_p30"))
    # others of verl's losses are left alone
    actor_config(
        *settings("model", "vanilla"), "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"
    )


def test_a_micro_batch_without_its_step_is_refused() -> None:
    config = actor_config(*settings("model", "trustbatch_grpo"))
    values = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match="sums over the whole optimizer step"):
        get_policy_loss_fn("trustbatch_grpo")(
            old_log_prob=values,
            log_prob=values,
            advantages=values,
            response_mask=values.bool(),
            loss_agg_mode="token-mean",
            config=config,
        )


def test_losses_of_verl_go_to_its_engines_unchanged() -> None:
    actor_config(*settings("model", "trustbatch_p3o"))  # wraps the engines
    config = actor_config(*settings("model", "vanilla"))
    with pytest.raises(NotImplementedError):  # of BaseEngine.optimizer_zero_grad
        BaseEngine().train_batch({}, partial(ppo_loss, config=config))


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        (build_objective("vcpo"), "choose another objective"),
        (build_objective("p3o", entropy_coef=0.1), "actor.entropy_coeff"),
        (build_objective("p3o", kl="top_k"), 'kl="importance"'),
    ],
)
def test_what_verl_can_not_do_is_refused_by_name(objective: Objective, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        register_objective("own", objective)
