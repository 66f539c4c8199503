"""Layers that are recomputed or compiled compute the same; AdamW in 8 bits learns the same."""

import copy
import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.training_cases import (
    make_trainer,
    policy_logp,
    sample_sequences,
    train,
    watch_gradients,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torch._inductor import cpp_builder
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from trustbatch.errors import ConfigError
from trustbatch.models.packing.layout import PackedLayout, Segment
from trustbatch.models.policy import Policy
from trustbatch.training import layers
from trustbatch.training.layers import compile_layers, keep_compiled_kernels, recompute_layers
from trustbatch.types import TrainSequence

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture
def sequences(policy: Policy) -> list[TrainSequence]:
    return sample_sequences(policy)


def gradients(policy: Policy, sequences: list[TrainSequence]) -> dict[str, torch.Tensor]:
    """The gradient of one step, before it is clipped to anything."""
    trainer = make_trainer(policy, gradient_clip=1e9, learning_rate=1e-30, weight_decay=0.0)
    found = watch_gradients(trainer)
    trainer.train(sequences)
    assert found
    return found


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recomputed_layers_give_the_same_gradient_bit_for_bit(
    policy: Policy, sequences: list[TrainSequence], packs: bool, dtype: torch.dtype
) -> None:
    policy.model.to(dtype)
    policy.packs = packs
    recomputed = copy.deepcopy(policy)
    recompute_layers(recomputed.model)
    expected, found = gradients(policy, sequences), gradients(recomputed, sequences)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def test_a_recomputed_layer_keeps_its_input_alone(policy: Policy) -> None:
    ids = torch.arange(2, 12).repeat(20)
    layout: PackedLayout = PackedLayout.of([Segment(len(ids))])
    sizes = []
    for _ in range(2):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor.nbytes) or tensor, lambda tensor: tensor
        ):
            policy.hidden_states(ids, layout, torch.arange(len(ids)))
        sizes.append(sum(kept))
        recompute_layers(policy.model)
    assert sizes[1] < 0.2 * sizes[0]


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_the_trainer_recomputes_layers_where_it_is_asked_to(
    policy: Policy, sequences: list[TrainSequence], is_recomputed: bool
) -> None:
    calls = []
    policy.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    make_trainer(policy, gradient_checkpointing=is_recomputed).train(sequences)
    assert len(calls) == (2 if is_recomputed else 1)


def test_nothing_of_it_is_seen_in_a_saved_model(policy: Policy, tmp_path: Path) -> None:
    names = [*policy.model.state_dict()]
    policy.save(tmp_path / "before")
    recompute_layers(policy.model)
    compile_layers(policy.model, backend="eager")
    policy.save(tmp_path / "after")
    assert [*policy.model.state_dict()] == names
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes(), path.name


def test_a_copy_of_recomputed_layers_has_its_own_parameters(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    recompute_layers(policy.model)
    copied = copy.deepcopy(policy)
    before = policy_logp(policy, sequences)
    train(copied, sequences, num_steps=1)
    assert torch.equal(policy_logp(policy, sequences), before)
    assert not torch.equal(policy_logp(copied, sequences), before)


@pytest.fixture
def counter() -> Iterator[CompileCounterWithBackend]:
    """Counts graphs, which are run as they are."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def test_another_model_of_the_same_shape_needs_no_graph_of_its_own(
    policy: Policy, counter: CompileCounterWithBackend
) -> None:
    """So a study compiles once; and the graphs do not keep the first model in memory."""
    ids = torch.randint(2, 12, (1, 7), generator=torch.Generator().manual_seed(0))
    counts, models = [], []
    for _ in range(2):
        other = copy.deepcopy(policy)
        compile_layers(other.model, backend=counter)  # type: ignore[arg-type]
        other.logits(ids, num_last=7).sum().backward()
        counts.append(counter.frame_count)
        models.append(weakref.ref(other.model))
        del other
        gc.collect()
    assert counts[0] == counts[1] > 0
    assert [model() for model in models] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_compiled_layers_are_compiled_a_few_times_for_all_batches(
    policy: Policy, counter: CompileCounterWithBackend, is_recomputed: bool
) -> None:
    compiled = copy.deepcopy(policy)
    compile_layers(compiled.model, backend=counter)  # type: ignore[arg-type]
    if is_recomputed:
        recompute_layers(compiled.model)
    generator = torch.Generator().manual_seed(0)
    num_graphs = []
    for number in range(20):
        lengths = torch.randint(1, 9, (number % 5 + 1,), generator=generator).tolist()
        responses = (2, 3) if number % 3 == 0 else ()
        segments = [Segment(length, responses) for length in lengths]
        layout: PackedLayout = PackedLayout.of(segments)
        num_tokens = sum(segment.num_tokens for segment in segments)
        ids = torch.randint(2, 12, (num_tokens,), generator=generator)
        at = torch.arange(num_tokens)
        results = []
        for each in (policy, compiled):
            with torch.no_grad():
                each.hidden_states(ids, layout, at)
            each.model.zero_grad()
            hidden = each.hidden_states(ids, layout, at)
            (hidden * at[:, None].sin()).sum().backward()
            results.append([hidden.detach(), each.model.model.layers[0].mlp.up_proj.weight.grad])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        num_graphs.append(counter.frame_count)
    # norm; query, key and value; output; the rest, and around attention: with gradient and without
    assert num_graphs[0] <= 12
    assert num_graphs[-1] == num_graphs[1], num_graphs


@pytest.mark.slow
@needs_compiler
def test_compiled_training_is_the_same_but_for_rounding(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    torch._dynamo.reset()
    compiled = copy.deepcopy(policy)
    expected = make_trainer(policy).train(sequences)
    trainer = make_trainer(compiled, compile=True, gradient_checkpointing=True)
    found = trainer.train(sequences)
    assert found["gradient/norm"] == pytest.approx(expected["gradient/norm"], rel=1e-4)
    # the engine's own forward pass is none of it
    assert sample_sequences(compiled)


def test_compiled_kernels_are_kept_in_a_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(variable, "mine")
    keep_compiled_kernels()
    assert os.environ[variable] == "mine"
    monkeypatch.setenv(variable, default_cache_dir())  # by torch itself
    keep_compiled_kernels()
    folder = Path(os.environ[variable])
    assert folder.parent == tmp_path / "trustbatch" / "compiled"
    assert [each.stat().st_mode & 0o777 for each in (folder, *folder.parents[:2])] == [0o700] * 3
    monkeypatch.delenv(variable)
    # other operators have compiled graphs of their own
    monkeypatch.setattr(layers.models, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "changed.py").touch()
    keep_compiled_kernels()
    assert Path(os.environ[variable]).parent == folder.parent != Path(os.environ[variable])
    assert os.environ[variable] != str(folder)
    monkeypatch.delenv(variable)
    (tmp_path / "trustbatch").chmod(0o777)  # others could put something there
    keep_compiled_kernels()
    assert variable not in os.environ
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_kernels()
    assert variable not in os.environ


COMPILE_ONCE = """
import torch
from torch._dynamo.utils import counters
from trustbatch.training.layers import keep_compiled_kernels
keep_compiled_kernels()
torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@needs_compiler
@pytest.mark.slow
def test_a_second_process_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch in this process may have set it
    hits = []
    for _ in range(2):
        command = [sys.executable, "-c", COMPILE_ONCE]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stderr
        hits.append(answer.stdout.split()[-2:])
    assert hits == [["0", "1"], ["1", "0"]]
    assert list((tmp_path / "trustbatch" / "compiled").glob("*/fxgraph"))


@needs_compiler
def test_the_trainer_keeps_compiled_kernels(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(layers, "keep_compiled_kernels", lambda: calls.append(1))
    make_trainer(policy, compile=True)
    assert calls == [1]


def test_a_missing_compiler_is_a_sentence(policy: Policy) -> None:
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with (
            inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}),
            pytest.raises(ConfigError, match=r"install g\+\+, or set it to false"),
        ):
            make_trainer(policy, compile=True)
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


def test_a_model_that_does_not_name_its_layers_is_refused(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy.model, "_no_split_modules", None)
    with pytest.raises(
        ConfigError, match=r"training.gradient_checkpointing needs the decoder layers"
    ):
        recompute_layers(policy.model)


@needs_compiler
def test_moments_in_8_bits_learn_the_same(policy: Policy, sequences: list[TrainSequence]) -> None:
    pytest.importorskip("torchao")
    plain, small = copy.deepcopy(policy), copy.deepcopy(policy)
    before = policy_logp(policy, sequences)
    train(plain, sequences, num_steps=6, learning_rate=1e-3)
    with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
        trainer = train(small, sequences, num_steps=6, learning_rate=1e-3, optimizer="adamw_8bit")
    moved = [policy_logp(each, sequences) - before for each in (plain, small)]
    assert float(moved[0].abs().mean()) > 0.05
    assert float((moved[1] - moved[0]).abs().mean()) < 0.1 * float(moved[0].abs().mean())
    for name, parameter in small.trained_parameters():
        state = trainer.optimizer.state[parameter]
        is_small = parameter.numel() < 4096 or parameter.numel() % 256 != 0
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            if is_small:
                assert moment.dtype == torch.float32, name
            else:
                assert moment.codes.dtype == torch.uint8, name
                assert moment.codes.nbytes + moment.scale.nbytes < 0.27 * parameter.nbytes
