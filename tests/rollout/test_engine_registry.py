"""Engines by capability: no engine's name is tested outside of the registry, and a new one runs."""

import ast
import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from trustbatch.api import train_config
from trustbatch.build.engines import build_engine
from trustbatch.config import Config, parse_config
from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.rollout import registry
from trustbatch.rollout.engine import EngineInfo, EngineSettings, RolloutEngine
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import Completion, GenerationRequest

SOURCE = Path(registry.__file__).parents[1]


def engine_tests(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """Lines that compare something with an engine's name, or list the names as a type."""
    for node in ast.walk(tree):
        tested: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            tested = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            tested = [node.value]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            tested = [node.slice]
        for each in tested:
            leaves = each.elts if isinstance(each, ast.Tuple | ast.List | ast.Set) else [each]
            if any(isinstance(leaf, ast.Constant) and leaf.value in names for leaf in leaves):
                yield node.lineno


def test_no_engine_name_is_tested_outside_of_the_registry() -> None:
    names = set(registry.engine_names())
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        if path != Path(registry.__file__)
        for line in engine_tests(ast.parse(path.read_text()), names)
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        'config.rollout.engine == "vllm"',
        'name in ("native", "other")',
        'engine: Literal["native", "vllm"]',
        'match name:\n    case "vllm":\n        pass',
    ],
)
def test_the_scan_finds_tests_of_names(code: str) -> None:
    assert list(engine_tests(ast.parse(code), {"native", "vllm"}))


class CopyEngine:
    """Samples from a copy of the policy, which only `load_weights` updates."""

    def __init__(self, policy: Policy, settings: EngineSettings) -> None:
        self.own = NativeEngine(copy.deepcopy(policy), seed=settings.seed, version=settings.version)
        self.num_loaded = 0

    @property
    def version(self) -> int:
        return self.own.version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return self.own.generate(requests)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.own.load_weights(weights, version)
        self.num_loaded += 1

    def sleep(self) -> None:
        self.own.sleep()

    def wake(self) -> None:
        self.own.wake()

    def close(self) -> None:
        self.own.close()


class CopyInfo(EngineInfo):
    """All that a new engine has to declare."""

    name = "copy"
    label = "copy"

    def __init__(self) -> None:
        self.built: list[CopyEngine] = []

    def build(self, policy: Policy, settings: EngineSettings) -> RolloutEngine:
        self.built.append(CopyEngine(policy, settings))
        return self.built[-1]


INFO = CopyInfo()


def config_of(model: Path, folder: Path, engine: str, **tables: object) -> Config:
    return parse_config(
        {
            "model": {"name": str(model), "device": "cpu", "precision": "float32"},
            "task": {"name": "arithmetic"},
            "rollout": {
                "engine": engine,
                "prompts_per_step": 2,
                "samples_per_prompt": 4,
                "max_tokens": 6,
                "canary_every": 1,
            },
            "training": {"steps": 3, "learning_rate": 1e-3},
            "run": {"folder": str(folder), "rollouts_every": 1},
            **tables,
        }
    )


def test_a_new_engine_is_one_registry_line(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.ENGINES, "copy", __name__)
    copied = train_config(config_of(tiny_folder, tmp_path / "copy", "copy"))
    native = train_config(config_of(tiny_folder, tmp_path / "native", "native"))
    (engine,) = INFO.built
    assert engine.num_loaded == engine.version == 3
    for ours, theirs in zip(copied.metrics, native.metrics, strict=True):
        values = {name for name in theirs if not name.startswith(("time/", "memory/"))}
        assert {name: ours[name] for name in values} == {name: theirs[name] for name in values}


def test_what_an_engine_does_not_declare_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r'rollout.engine = "copy" is not known.*"native" or'):
        config_of(tiny_folder, tmp_path, "copy")
    monkeypatch.setitem(registry.ENGINES, "copy", __name__)
    cluster = {"in_flight": True, "max_lag": 2}
    with pytest.raises(
        ConfigError, match=r'in_flight is not available with rollout.engine = "copy"'
    ):
        config_of(tiny_folder, tmp_path, "copy", cluster=cluster)


def test_the_precision_of_keys_and_values_is_the_engines(tiny_folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    config = config_of(tiny_folder, tmp_path, "native", rollout={"kv_precision": "fp8"})
    engine = build_engine(config, policy)
    assert isinstance(engine, NativeEngine)
    assert engine.kv_precision == "fp8"
    rollout = {"engine": "vllm", "kv_precision": "fp8"}
    with pytest.raises(ConfigError, match=r'rollout.kv_precision = "fp8" is not available with'):
        build_engine(config_of(tiny_folder, tmp_path, "vllm", rollout=rollout), policy)
