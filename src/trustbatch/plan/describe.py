"""What `--dry-run` shows: the work of one step, its memory, and advice if that is short."""

from trustbatch.checkpoints.load import list_checkpoints
from trustbatch.config import Config
from trustbatch.config.cautions import cautions
from trustbatch.models.loading import count_parameters
from trustbatch.plan.advice import advise
from trustbatch.plan.demand import amounts, seen_by_ray
from trustbatch.plan.estimate import Estimator
from trustbatch.plan.hardware import Hardware, find_hardware
from trustbatch.plan.memory import CACHE, MemoryPlan, Phase, Setting, size
from trustbatch.rollout.config import SecondPolicyConfig
from trustbatch.tasks import FilteredTask, Task

MARGIN = " " * 12


def describe_plan(
    config: Config, task: Task | None = None, *, hardware: Hardware | None = None
) -> str:
    """Describe the run that a configuration would start, without loading weights."""
    hardware = hardware or find_hardware(config)
    estimator = Estimator.of(config, hardware, task)
    rollout, training = config.rollout, config.training
    num_sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    lines = [
        f"model       {config.model.name}: {estimator.outline.num_parameters:,} parameters on "
        f"{_devices(hardware, is_cluster=config.cluster is not None)}",
        *([f"task        {task.describe()}"] if isinstance(task, FilteredTask) else []),
        f"step        {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = "
        f"{num_sequences} completions of at most {rollout.max_tokens} tokens",
        f"updates     {training.steps} steps x {training.passes} passes x "
        f"{training.mini_batches} optimizer steps",
        *_processes(estimator),
        *_memory(estimator),
        *[_second_policy(config, second) for second in rollout.policies],
        f"results     {config.run.path}{_continues(config)}",
        *(f"caution     {sentence}" for sentence in cautions(config)),
    ]
    return "\n".join(lines)


def _processes(estimator: Estimator) -> list[str]:
    """Describe the processes of a run with [cluster], and the resources of each."""
    demand, hardware = estimator.demand, estimator.hardware
    if demand is None:
        return []
    lines = [
        f"{kind.size} {kind.kind}{'s' if kind.size > 1 else ''} with "
        f"{amounts(kind.each, kind.each)}{' each' if kind.size > 1 else ''}"
        for kind in demand.kinds
    ]
    if not demand.trainers.size:
        where = ", on a GPU" if hardware.is_gpu else ""
        lines.insert(0, f"1 trainer, the process that is started{where}")
    if hardware.is_gpu:
        nodes = seen_by_ray(estimator.config, hardware.num_available)
        of_ray = sum(node["GPU"] for node in nodes)
        lines.append(
            demand.obstacle(nodes) or f"in total {demand.num_gpus:g} of Ray's {of_ray:g} GPUs"
        )
    first, *others = lines
    return [f"cluster     {first}", *(MARGIN + other for other in others)]


def _memory(estimator: Estimator) -> list[str]:
    setting = Setting.of(estimator.config, num_gpus=estimator.hardware.num_gpus)
    plan = estimator.plan(setting)
    first, *others = [_phase(phase) for phase in plan.phases]
    lines = [f"memory      {first}", *(MARGIN + other for other in others)]
    prompts = f"prompts of up to {plan.prompt_tokens} tokens"
    if plan.is_prompt_assumed:
        prompts += " (assumed)"
    per = "each GPU" if plan.is_gpu else "each process" if plan.num_gpus > 1 else "this machine"
    where = f"on {per}"
    if estimator.demand is not None and not estimator.shares_gpu:
        what = "on the GPU" if plan.is_gpu else "in the process"
        where = f"generate {what} of each engine, train {what} of each trainer"
    lines.append(f"{MARGIN}{where}, with {prompts}")
    if plan.fits:
        lines.append(f"{MARGIN}fits: needs {size(plan.needed)} of {size(plan.capacity)}")
        lines += _waiting(plan, halves=_has_fp8_cache(estimator, setting))
    else:
        advice = advise(estimator, setting, limit=plan.capacity)
        lines.append(
            f"{MARGIN}does not fit: needs {size(plan.needed)} of {size(plan.capacity)}: {advice}."
        )
    return lines


def _phase(phase: Phase) -> str:
    parts = ", ".join(f"{part.name} {size(part.num_bytes)}" for part in phase.parts)
    return f"{phase.name:8} {size(phase.total)}: {parts}"


def _has_fp8_cache(estimator: Estimator, setting: Setting) -> bool:
    """Whether rollout.kv_precision = "fp8" is there to be set."""
    return estimator.has_pages and estimator.hardware.converts_fp8 and not setting.fp8_cache


def _waiting(plan: MemoryPlan, *, halves: bool) -> list[str]:
    """Note if some sequences have to wait for the memory of others; `halves`: FP8 would help."""
    generate = plan.phase("generate")
    if generate.total <= plan.capacity:
        return []
    elastic = next(part for part in generate.parts if part.name == CACHE).num_bytes
    available = plan.capacity - generate.needed_beside(CACHE)
    sentence = (
        f"{MARGIN}keys and values get {size(available)} of {size(elastic)}: some sequences wait "
        "for others to finish, which takes longer but gives the same results"
    )
    if halves and plan.is_gpu:
        sentence += '; rollout.kv_precision = "fp8" halves them'
    return [sentence]


def _second_policy(config: Config, second: SecondPolicyConfig) -> str:
    num_parameters, _ = count_parameters(second.model, trust_remote_code=second.trust_remote_code)
    temperature = second.temperature or config.rollout.temperature
    return (
        f"policy      {second.policy_name}: {second.share:.0%} of samples at temperature "
        f"{temperature}, {num_parameters:,} parameters, {size(4 * num_parameters)}"
    )


def _devices(hardware: Hardware, *, is_cluster: bool) -> str:
    number = hardware.num_available if hardware.is_gpu and is_cluster else hardware.num_gpus
    return hardware.name if number == 1 else f"{number} x {hardware.name}"


def _continues(config: Config) -> str:
    checkpoints = list_checkpoints(config.run.path / "checkpoints")
    return f" (continues from {checkpoints[-1].name})" if checkpoints else ""
