"""One call from a model's name to a session that answers: `load` and `load_language`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgewise.backends import available_backends, load_program
from edgewise.backends.decoder.base import load_decoder
from edgewise.backends.registry import full_name
from edgewise.device import device_fingerprint
from edgewise.device.monitor import Monitor
from edgewise.device.sensor import make_sensors
from edgewise.errors import BackendUnavailable, ConfigError, ProfileError
from edgewise.exits import check_policy_name
from edgewise.frontends.checkpoint import load_model
from edgewise.frontends.language import load_language_model
from edgewise.frontends.language.exits_file import find_exits, load_exits
from edgewise.frontends.language.folder import out_of_memory
from edgewise.model.decoding import LanguageExits
from edgewise.predict import CostTable
from edgewise.predict.fitted import FittedPredictor
from edgewise.profiles import ProfileStore, default_store_path, read_profile
from edgewise.profiling import device_record, find_profile, measure, thread_policy
from edgewise.runtime import Session
from edgewise.runtime.generation import LanguageCosts, LanguageSession
from edgewise.runtime.generation.costs import probe_lengths, probe_programs
from edgewise.runtime.generation.program import TokenProgram, staged_decoder
from edgewise.runtime.generation.state import TextState
from edgewise.runtime.repricing import Repricer

if TYPE_CHECKING:
    from edgewise.backends import Program
    from edgewise.backends.decoder.base import DecoderProgram, HeadChoice, Precision
    from edgewise.clock import Clock
    from edgewise.exits import Policy
    from edgewise.model import StagedModel
    from edgewise.model.language import LanguageModel
    from edgewise.profiles import Profile
    from edgewise.profiling import Progress

_log = logging.getLogger(__name__)
_MOST_EXITS = 6
# Each kind of unit, in each of its three situations; a first start waits for it.
_PROBE_CAP_S = 1.5

LANGUAGE_BACKEND = "torch:cpu"
"""Where language models run by default."""


def load(  # noqa: PLR0913 - one keyword per choice a user may make
    model: str | Path | StagedModel,
    *,
    backend: str = "auto",
    threads: int = 1,
    policy: str | Policy = "edgewise",
    profile: str | Path = "auto",
    store: str | Path | None = None,
    predictor: str | Path | FittedPredictor | None = None,
    clock: Clock | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **policy_options: Any,
) -> Session:
    """Open a model for requests on this machine.

    Args:
        model: A shipped name, a checkpoint directory, an ``.onnx`` file, or a staged model.
        backend: ``runtime`` or ``runtime:device``; ``"auto"`` takes the best one installed.
        threads: Threads of each call.
        policy: A policy's name, or a policy.
        profile: ``"auto"`` takes the stored profile, and measures a quick one (seconds) where there
            is none. ``"stored"`` refuses to measure. Otherwise the path of an exported profile.
        store: Where profiles are kept; the user's store by default.
        predictor: Of the model's costs in every state of this device, or the file that
            ``edgewise fit`` wrote. The device is then watched from a thread of its own, which ends
            with the session's ``close`` or ``with`` block.
        clock: Tells time; the machine's by default.
        on_progress: Told how a measurement goes.
        policy_options: The policy's own arguments.

    Raises:
        CheckpointError: The model is missing or damaged.
        BackendUnavailable: The backend is unknown or not installed.
        ProfileError: The profile or predictor is damaged, or from another device, thread policy or
            version of the model.
        ConfigError: Unknown policy, or an argument out of range.
    """
    if isinstance(policy, str):
        check_policy_name(policy)  # before anything slow
    fitted = _predictor_of(predictor, policy_options)
    staged = load_model(model) if isinstance(model, str | Path) else model
    name = best_backend() if backend == "auto" else full_name(backend)
    program = load_program(staged, name, threads=threads)
    costs = costs_of(program, profile=profile, store=store, on_progress=on_progress)
    repricer, monitor = _watch(fitted, program)
    session = Session(program, costs, policy=policy, clock=clock, source=monitor, **policy_options)
    session.warm_up()
    if repricer is not None and monitor is not None:
        repricer.add(session.policy)
        monitor.start()
    return session


def load_language(  # noqa: PLR0913 - one keyword per choice a user may make
    model: str | Path | LanguageModel,
    *,
    backend: str = LANGUAGE_BACKEND,
    precision: Precision = "fp32",
    threads: int = 1,
    exit_layers: Sequence[int] | None = None,
    exits: LanguageExits | str | Path | None = "auto",
    head: HeadChoice = "auto",
    policy: str | Policy = "edgewise",
    profile: str | Path = "auto",
    store: str | Path | None = None,
    predictor: str | Path | FittedPredictor | None = None,
    clock: Clock | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **policy_options: Any,
) -> LanguageSession:
    """Open a language model for texts on this machine.

    Args:
        model: A name that ``edgewise pull`` knows, a Hugging Face folder, a GGUF file, or a model.
        backend: ``runtime`` or ``runtime:device``.
        precision: Of the weights.
        threads: Threads of each call.
        exit_layers: After how many layers one may leave; by default at most six of those with a
            fitted exit, and at full depth alone where none is fitted.
        exits: Fitted exits, or the file that ``edgewise fit-exits`` wrote; ``"auto"`` takes those
            kept for the model, ``None`` does without.
        head: What answers at exits: ``"auto"`` takes the short list where one was fitted, the
            affine maps and the whole head where none was.
        policy: A policy's name, or a policy.
        profile: ``"auto"`` takes the stored costs, and measures them (seconds) where there are
            none; ``"stored"`` refuses to measure. Otherwise the path of an exported profile.
        store: Where profiles are kept; the user's store by default.
        predictor: Of a token's costs in every state of this device, as for `load`.
        clock: Tells time; the machine's by default.
        on_progress: Told how a measurement goes.
        policy_options: The policy's own arguments.

    Raises:
        ConfigError: No such model, policy or exit, or an argument out of range.
        ModelError: A model that is not supported, damaged, or larger than the memory that is free;
            exits of other weights.
        CheckpointError: The file of exits is missing or damaged.
        BackendUnavailable: The backend is unknown or not installed.
        OpUnsupported: The backend cannot have this precision.
        ProfileError: The store is damaged, or holds no costs and none may be measured; the profile
            or predictor is damaged, or of another model, precision, backend, device or number of
            threads.
    """
    if isinstance(policy, str):
        check_policy_name(policy)  # before anything slow
    watching = _predictor_of(predictor, policy_options)
    try:
        decoder = open_decoder(
            model,
            backend=backend,
            precision=precision,
            threads=threads,
            exit_layers=exit_layers,
            exits=exits,
        )
        kind = decoder.exit_head(head)
        outline = TokenProgram(
            TextState(decoder, 1), model=staged_decoder(decoder, head=kind), head=kind
        )
        repricer, monitor = _watch(watching, outline)
        costs = language_costs_of(
            decoder, head=kind, profile=profile, store=store, on_progress=on_progress
        )
        session = LanguageSession(
            decoder, costs, policy=policy, head=kind, clock=clock, source=monitor, **policy_options
        )
        session.warm_up()
        if repricer is not None and monitor is not None:
            repricer.add(session)
            monitor.start()
    except MemoryError:
        pass  # raised below: as its context it would keep alive what was loaded
    else:
        return session
    raise out_of_memory(str(model) if isinstance(model, str | Path) else model.name)


def open_decoder(  # noqa: PLR0913 - as load_language
    model: str | Path | LanguageModel,
    *,
    backend: str = LANGUAGE_BACKEND,
    precision: Precision = "fp32",
    threads: int = 1,
    exit_layers: Sequence[int] | None = None,
    exits: LanguageExits | str | Path | None = "auto",
) -> DecoderProgram:
    """Load a language model on a backend with the exits that it has; arguments as `load_language`.

    Raises:
        EdgeError: As `load_language`.
    """
    loaded = load_language_model(model) if isinstance(model, str | Path) else model
    fitted = _exits_of(loaded, exits)
    depth = loaded.architecture.num_hidden_layers
    if exit_layers is None:
        exit_layers = _spread(() if fitted is None else sorted(fitted.affine))
    elif wrong := [k for k in exit_layers if not 1 <= k < depth]:
        raise ConfigError(
            f"expected exits after 1 to {depth - 1} layers, found {', '.join(map(str, wrong))}",
            help="full depth always answers, and is not named",
        )
    return load_decoder(
        loaded,
        backend,
        threads=threads,
        precision=precision,
        exit_layers=exit_layers,
        exits=fitted,
    )


def language_costs_of(
    decoder: DecoderProgram,
    *,
    head: HeadChoice = "auto",
    profile: str | Path = "auto",
    store: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> LanguageCosts:
    """Find or measure what tokens of a loaded model cost here; arguments as `load_language`.

    A token is measured after a short and a long text, and without the KV policy's work, in turn.

    Raises:
        ProfileError: As `load_language`.
    """
    programs, num = probe_programs(decoder, head=decoder.exit_head(head)), len(decoder.exit_layers)
    try:
        found = _profile_of(programs, profile, store, on_progress, time_cap_s=_PROBE_CAP_S)
        near, far, mask = (
            CostTable.from_profile(found, backend=each, num_exits=num) for each in programs
        )
    except ProfileError as error:
        if not (error.help or "").startswith("edgewise profile"):
            raise
        raise ProfileError(error.message, help=_profile_command(decoder)) from error
    near_length, far_length = probe_lengths(decoder.model.context_length)
    return LanguageCosts.of(near, far, mask, near_length=near_length, far_length=far_length)


def _profile_command(decoder: DecoderProgram) -> str:
    said = f"edgewise profile {decoder.model.name} --backend {decoder.backend}"
    if decoder.precision != "fp32":
        said += f" --precision {decoder.precision}"
    return f"{said} --threads {decoder.threads}"


def _exits_of(
    model: LanguageModel, exits: LanguageExits | str | Path | None
) -> LanguageExits | None:
    if exits is None or isinstance(exits, LanguageExits):
        return exits
    if exits == "auto":
        return find_exits(model.digest)
    return load_exits(Path(exits), digest=model.digest)


def _spread(layers: Sequence[int]) -> list[int]:
    """At most six, evenly among them, the last kept.

    Example:
        >>> _spread(range(1, 30)), _spread([2, 5])
        ([5, 10, 14, 19, 24, 29], [2, 5])
    """
    count = min(len(layers), _MOST_EXITS)
    return [layers[round((i + 1) * len(layers) / count) - 1] for i in range(count)]


def _predictor_of(
    predictor: str | Path | FittedPredictor | None, policy_options: Mapping[str, Any]
) -> FittedPredictor | None:
    if isinstance(predictor, str | Path):
        predictor = FittedPredictor.load(Path(predictor))
    if policy_options.get("energy_budget_j") is not None and (
        predictor is None or predictor.energy is None
    ):
        raise ConfigError(
            "an energy budget needs a predictor that predicts energy; none is given",
            help="fit one where a meter exists: edgewise doctor names the meters",
        )
    return predictor


def _watch(
    predictor: FittedPredictor | None, program: Program
) -> tuple[Repricer, Monitor] | tuple[None, None]:
    """What watches the device with a predictor, not started yet; nothing without one."""
    if predictor is None:
        return None, None
    check_predictor(predictor, program)
    repricer = Repricer(predictor)
    return repricer, Monitor(make_sensors(), on_state=[repricer.on_state])


def predictor_facts(program: Program) -> dict[str, object]:
    """What a predictor of a loaded program's costs is kept with, and is checked by."""
    return {
        "backend": program.backend,
        "threads": program.threads,
        **(program.facts if isinstance(program, TokenProgram) else {}),
        "model_version": program.model.version(),
        "device_id": device_fingerprint().id,
    }


def check_predictor(predictor: FittedPredictor, program: Program) -> None:
    """Refuse a predictor that says nothing about a loaded model on this machine.

    Raises:
        ProfileError: It was fitted for another number of stages, another version of the model,
            another backend, precision or number of threads, or to another device or a simulated
            one.
    """
    remedy = f"edgewise fit {program.model.name} --measure"
    if predictor.provenance != "measured":
        raise ProfileError(
            f"expected a predictor fitted to this device, found a {predictor.provenance} one",
            help=remedy,
        )
    here = {**predictor_facts(program), "stages": len(program.model.stages)}
    told = {"stages": predictor.num_stages, **predictor.facts}
    for name, value in here.items():
        if name in told and told[name] != value:
            raise ProfileError(
                f"the predictor was fitted for another {name.replace('_', ' ')}: expected"
                f" {value!r}, found {told[name]!r}",
                help=remedy,
            )


def best_backend() -> str:
    """The first installed backend in the order of preference.

    Raises:
        BackendUnavailable: None is installed.
    """
    names = available_backends()
    if not names:
        raise BackendUnavailable(
            "no runtime is installed that can run a model",
            help="pip install 'edgewise[onnx]'",
        )
    return names[0]


def costs_of(
    program: Program,
    *,
    profile: str | Path = "auto",
    store: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> CostTable:
    """Find or measure what a loaded model costs here.

    Raises:
        ProfileError: As `load`.
    """
    found = _profile_of({program.backend: program}, profile, store, on_progress)
    return CostTable.from_profile(
        found, backend=program.backend, num_exits=len(program.model.stages)
    )


def _profile_of(
    programs: Mapping[str, Program],
    profile: str | Path,
    store: str | Path | None,
    on_progress: Callable[[Progress], None] | None,
    *,
    time_cap_s: float | None = None,
) -> Profile:
    """Of one model; the first program's profile, which holds the others as well."""
    name, program = next(iter(programs.items()))
    if profile not in ("auto", "stored"):
        given = read_profile(Path(profile))
        device = device_fingerprint()
        given.check_usable(
            model_version=program.model.version(),
            device_id=device.id,
            thread_policy=thread_policy(program.threads),
            device=device_record(device),
        )
        return given
    kept = ProfileStore(Path(store) if store is not None else default_store_path())
    try:
        return find_profile(program.model, name, threads=program.threads, store=kept)
    except ProfileError as reason:
        # Another remedy than measuring means that the store itself is in trouble.
        if profile == "stored" or not (reason.help or "").startswith("edgewise profile"):
            raise
        _log.info("measuring a quick profile: %s", reason.message)
        return measure(programs, kept, quick=True, time_cap_s=time_cap_s, on_progress=on_progress)
