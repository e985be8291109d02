"""From a path, a backend's name and flat keywords to the object, every check before any framework is imported.

Order: name -> installed version -> settings -> capabilities -> model folder -> preflight rules; then the one class is
imported and built. `resolve_engine` and `resolve_trainer` stop before that and return the checked plan.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from verl_adaptor.capabilities import BackendSpec, Role
from verl_adaptor.config import Config, EngineConfig, ExecutionConfig, ParallelConfig, TrainerConfig, flatten_fields
from verl_adaptor.errors import (
    BackendNotInstalled,
    BrokenPlugin,
    ConfigError,
    ModelError,
    UnknownKey,
    UnsupportedCapability,
    nearest,
)
from verl_adaptor.execution import (
    HostedEngine,
    HostedTrainer,
    RanksConfig,
    Recipe,
    RemoteTrainer,
    WorkerGroup,
    WorkerPool,
    ranks_running,
)
from verl_adaptor.objects import departures
from verl_adaptor.preflight import Facts, check
from verl_adaptor.preflight.model import read_model_config
from verl_adaptor.preflight.requests import requests
from verl_adaptor.preflight.versions import Framework, check_version, installed, usable
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.registry import IN_PROCESS, get_spec, register, registry

PathLike = str | os.PathLike[str]
ConfigT = TypeVar("ConfigT", EngineConfig, TrainerConfig)
BuiltT = TypeVar("BuiltT", InferenceEngine, TrainerBackend)
PROTOCOLS: Mapping[Role, type[InferenceEngine] | type[TrainerBackend]]
PROTOCOLS = {"inference": InferenceEngine, "training": TrainerBackend}


def create_inference_engine(path: PathLike, backend: str = "hf", **settings: Any) -> InferenceEngine:
    """An engine that serves the model.

    Args:
        path: a Hugging Face model folder, or a hub id.
        backend: a name or alias that ``verl-adaptor backends`` lists.
        settings: fields of `EngineConfig`, of `ParallelConfig` and of the backend's own options, side by side.

    Raises:
        UnknownBackend, DuplicateBackend, BrokenPlugin: the name leads to no usable backend.
        BackendNotInstalled, BackendVersionError: its framework is missing, or outside the measured range.
        UnknownKey, ConfigError: a setting is unknown or wrong, or does not fit the model.
        UnsupportedCapability: a setting asks for what this backend does not do.
        ModelError: `path` is no model folder.
    """
    return resolve_engine(path, backend, **settings).create()


def create_trainer_backend(path: PathLike, backend: str = "hf", **settings: Any) -> TrainerBackend:
    """A trainer of the model; settings are fields of `TrainerConfig`, of `ParallelConfig` and the backend's own options.

    Raises as `create_inference_engine` does.
    """
    return resolve_trainer(path, backend, **settings).create()


def resolve_engine(path: PathLike | None, backend: str = "hf", **settings: Any) -> Plan[InferenceEngine, EngineConfig]:
    """Check everything `create_inference_engine` would, and import nothing heavy.

    `path` may be None for a model that does not exist yet; then it is given to, and checked by, `Plan.create`.
    """
    spec, config, options = _resolve("inference", backend, EngineConfig, settings)
    plan: Plan[InferenceEngine, EngineConfig]
    plan = Plan(role="inference", spec=spec, config=config, options=options)
    return plan.on(path)


def resolve_trainer(path: PathLike | None, backend: str = "hf", **settings: Any) -> Plan[TrainerBackend, TrainerConfig]:
    """As `resolve_engine`, for a trainer."""
    spec, config, options = _resolve("training", backend, TrainerConfig, settings)
    plan: Plan[TrainerBackend, TrainerConfig]
    plan = Plan(role="training", spec=spec, config=config, options=options)
    return plan.on(path)


@dataclass(frozen=True, kw_only=True)
class Plan(Generic[BuiltT, ConfigT]):
    """A backend with checked settings, not built yet."""

    role: Role
    spec: BackendSpec
    config: ConfigT
    options: Config | None
    """The backend's own options; None if it has none."""
    path: str | None = None
    """The model; None if it does not exist yet."""

    def on(self, path: PathLike | None) -> Plan[BuiltT, ConfigT]:
        """The same plan for this model, its folder and dimensions checked."""
        model = None if path is None else read_model_config(path)
        check(self.spec, Facts(role=self.role, config=self.config, options=self.options, model=model))
        return dataclasses.replace(self, path=None if path is None else str(Path(path).expanduser()))

    @property
    def ranks(self) -> RanksConfig | None:
        """What it asks of a `WorkerPool`; None for an engine of this process, or with processes of its own.

        Raises:
            ConfigError: an engine of several ranks is to stay in this process, and that is not one of as many.
        """
        return self.config if isinstance(self.config, TrainerConfig) else _ranks_wanted(self.spec, self.config)

    def create(self, path: PathLike | None = None, *, workers: WorkerPool | None = None, copy: int = 0) -> BuiltT:
        """Import the backend's class and build it, in this process or on the ranks that the settings ask for.

        Args:
            path: for a plan that was made without one.
            workers: where ranks come from, to share them with others; None starts ranks of its own if needed,
                which end with it.
            copy: another number shares no ranks with this one.

        Raises:
            ConfigError: there is no room for the ranks, or an executor that contradicts other settings.
            WorkerError: a rank does not come up.
        """
        plan = self if path is None else self.on(path)
        if plan.path is None:
            raise ModelError("this plan was made without a model; give create() the path of one.")
        if plan.ranks is not None:
            group = (workers or WorkerPool()).group(plan.ranks, plan.spec.name, copy)
            if group is not None:
                return _remote(plan, plan.path, group, owns_group=workers is None)
        built: BuiltT = load_class(plan.spec, plan.role)(plan.path, plan.config, plan.options, plan.spec)
        return built


# -- ranks in other processes ------------------------------------------------------------------------------------


def _ranks_wanted(spec: BackendSpec, config: EngineConfig) -> EngineConfig | None:
    """The ranks of an engine that runs in a worker group, as `WorkerPool.group` takes them; None for one that runs here.

    That is one of several ranks, unless it makes processes of its own, and one that the execution settings send elsewhere.

    Raises:
        ConfigError: it is to stay in this process, and that is not one of as many ranks; or it has processes of its own and
            is to go elsewhere.
    """
    execution, ranks = config.execution, config.world_size
    if spec.own_processes and _is_sent(execution):
        raise ConfigError(
            f"backend {spec.name!r} starts processes of its own, and no worker group drives them: leave out executor='ray', "
            "ray_address and python_executable; mode='async' puts the engine beside this process."
        )
    if spec.own_processes:
        return None
    if execution.executor == "inline" and ranks > 1 and ranks_running() != ranks:
        raise ConfigError(
            f"executor='inline' with {ranks} ranks of an engine, and this process is one of {ranks_running()}; leave executor "
            "out: then the ranks are started."
        )
    return config if _is_sent(execution) or (ranks > 1 and execution.executor == "auto") else None


def _is_sent(execution: ExecutionConfig) -> bool:
    """Whether the settings put an engine into other processes even if it is of one rank."""
    elsewhere = execution.ray_address is not None or execution.python_executable is not None
    return execution.executor == "ray" or elsewhere


def _remote(plan: Plan[Any, Any], path: str, group: WorkerGroup, *, owns_group: bool) -> Any:
    from verl_adaptor.execution.remote_engine import RemoteEngine

    training = plan.role == "training"
    builder = host_trainer if training else host_engine
    kind: Any = RemoteTrainer if training else RemoteEngine
    recipe = Recipe(f"{__name__}:{builder.__name__}", _arguments(plan))
    return kind(path, plan.config, plan.options, plan.spec, group=group, recipe=recipe, owns_group=owns_group)


def host_engine(path: str, backend: str, settings: Mapping[str, Any], spec: BackendSpec | None) -> HostedEngine:
    """As `host_trainer`, for an engine."""
    if spec is not None:
        register(spec)
    return HostedEngine(resolve_engine(path, backend, **settings).create())


def host_trainer(path: str, backend: str, settings: Mapping[str, Any], spec: BackendSpec | None) -> HostedTrainer:
    """Build a trainer on one rank of a worker group; `spec` is for a backend that no installed package registers."""
    if spec is not None:
        register(spec)
    return HostedTrainer(resolve_trainer(path, backend, **settings).create())


def _arguments(plan: Plan[Any, Any]) -> dict[str, Any]:
    """`host_trainer`'s and `host_engine`'s, as built-ins: the settings flat again, the executor's share resolved."""
    config, execution = plan.config, plan.config.execution
    settings = config.model_dump(mode="json", exclude_unset=True, exclude={"parallel", "execution"})
    settings |= config.parallel.model_dump(mode="json", exclude_unset=True)
    settings |= {} if plan.options is None else plan.options.model_dump(mode="json", exclude_unset=True)
    settings |= {"executor": "inline", "call_timeout_s": execution.call_timeout_s}
    path = Path(plan.path or "")
    unknown = any(entry.spec is plan.spec and entry.source == IN_PROCESS for entry in registry().entries)
    return {
        "path": str(path.absolute()) if path.exists() else plan.path,
        "backend": plan.spec.name,
        "settings": settings,
        "spec": plan.spec if unknown else None,
    }


# -- settings ----------------------------------------------------------------------------------------------------


def _resolve(
    role: Role, backend: str, model: type[ConfigT], settings: Mapping[str, Any]
) -> tuple[BackendSpec, ConfigT, Config | None]:
    spec = get_spec(backend, role)
    elsewhere = settings.get("python_executable")
    framework = None if elsewhere else check_version(spec)  # another environment checks its own
    config, options = build_config(model, options_model(spec, role), settings)
    _check_capabilities(spec, role, config, framework)
    return spec, config, options


def build_config(
    model: type[ConfigT], options: type[Config] | None, settings: Mapping[str, Any]
) -> tuple[ConfigT, Config | None]:
    """Deal flat settings out to the common config, its parallel part and the backend's options.

    Raises:
        UnknownKey, ConfigError: every problem at once, a line each.
    """
    nested: dict[str, type[Config]] = _nested(model)
    home = flatten_fields(model, nested)
    home |= dict.fromkeys(options.model_fields if options else (), "options")
    parts: dict[str | None, dict[str, Any]] = {name: {} for name in [None, "options", *nested]}
    unknown = [f"{key}: unknown setting; {nearest(key, home)}." for key in settings if key not in home]
    for key, value in settings.items():
        if key in home:
            parts[home[key]][key] = value
    problems: list[str] = []
    inner: dict[str, Any] = {name: _build(part, parts[name], problems) or part() for name, part in nested.items()}
    config = _build(model, {**parts[None], **inner}, problems)
    own = _build(options, parts["options"], problems) if options else None
    if unknown or problems or config is None:
        raise (UnknownKey if unknown else ConfigError)("\n".join(unknown + problems))
    return config, own


def _nested(model: type[Config]) -> dict[str, type[Config]]:
    """The parts of a common config that flat keywords reach into."""
    parts: dict[str, type[Config]] = {"parallel": ParallelConfig, "execution": ExecutionConfig}
    return {name: part for name, part in parts.items() if name in model.model_fields}


AnyConfig = TypeVar("AnyConfig", bound=Config)


def _build(model: type[AnyConfig], values: Mapping[str, Any], problems: list[str]) -> AnyConfig | None:
    try:
        return model(**values)
    except ConfigError as error:
        problems += str(error).splitlines()
        return None


def options_model(spec: BackendSpec, role: Role) -> type[Config] | None:
    """The model of the backend's own options for this role; None if it has none."""
    where = spec.engine_options if role == "inference" else spec.trainer_options
    if where is None:
        return None
    options = load_object(spec, where)
    if not (isinstance(options, type) and issubclass(options, Config)):
        raise BrokenPlugin(f"backend {spec.name!r}: {where} is no subclass of verl_adaptor.config.Config.")
    common = EngineConfig if role == "inference" else TrainerConfig
    shadowed = options.model_fields.keys() & flatten_fields(common, _nested(common)).keys()
    if shadowed:
        raise BrokenPlugin(f"backend {spec.name!r}: {where} redefines common settings: {', '.join(sorted(shadowed))}.")
    return options


# -- capabilities ------------------------------------------------------------------------------------------------


def _check_capabilities(
    spec: BackendSpec, role: Role, config: EngineConfig | TrainerConfig, framework: Framework | None
) -> None:
    problems = []
    for setting, capability in requests(config):
        support = spec.support(capability)
        if not usable(support, framework, config.device, role):
            others = [name for name in registry().supporting(capability, role) if name.split()[0] != spec.name]
            problems.append(
                f"backend {spec.name!r} cannot do {setting} ({capability} is {support}); {_elsewhere(others)}."
            )
    problems += _undeclared(spec, role, config.parallel)
    if problems:
        raise UnsupportedCapability("\n".join(problems))


def _undeclared(spec: BackendSpec, role: Role, parallel: ParallelConfig) -> list[str]:
    """The two choices that are no capability of their own: each value is declared in the spec."""
    problems = []
    for setting, field in (("zero_stage", "zero_stages"), ("gradient_sync", "gradient_syncs")):
        value = getattr(parallel, setting)
        declared = getattr(spec, field) if role == "training" else ()
        if value is not None and value not in declared:
            others = [e.spec.name for e in registry().entries if e.spec.trainer and value in getattr(e.spec, field)]
            allowed = ", ".join(map(repr, declared)) or "leave it out"
            problems.append(
                f"backend {spec.name!r} cannot do {setting}={value!r} (allowed: {allowed}); "
                + (_elsewhere(others) if role == "training" else "it is a setting of trainers")
                + "."
            )
    return problems


def _elsewhere(names: list[str]) -> str:
    return f"backends that have it: {', '.join(names)}" if names else "no registered backend has it"


# -- importing ---------------------------------------------------------------------------------------------------


def load_class(spec: BackendSpec, role: Role) -> type[Any]:
    """Import the one class that plays this role.

    Raises:
        BackendNotInstalled: an import failed; the cause is chained.
        BrokenPlugin: what the spec names is not there, no subclass of the protocol, or cannot be called as it is.
    """
    where = (spec.engine if role == "inference" else spec.trainer) or ""
    base, found = PROTOCOLS[role], load_object(spec, where)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise BrokenPlugin(f"backend {spec.name!r}: {where} is no subclass of verl_adaptor.{base.__name__}.")
    if problems := departures(found, base):
        raise BrokenPlugin(f"backend {spec.name!r}: {where} is no {base.__name__}: {'; '.join(problems)}.")
    return found


def load_object(spec: BackendSpec, where: str) -> Any:
    """What ``package.module:Name`` in a spec names."""
    module, _, name = where.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        framework = installed(spec)
        state = f"{' '.join(framework)} is installed, but" if framework else "its framework may be missing:"
        cure = f"{'Reinstall' if framework else 'Install'} it with: {spec.install}" if spec.install else ""
        raise BackendNotInstalled(
            f"backend {spec.name!r} cannot be imported: {state} importing {module} failed with: {error}. {cure}".rstrip()
        ) from error
    except AttributeError as error:
        raise BrokenPlugin(f"backend {spec.name!r}: importing {where} failed: {error}.") from error
    except Exception as error:
        raise BrokenPlugin(
            f"backend {spec.name!r}: importing {module} raised {type(error).__name__}: {error}."
        ) from error
