from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgewise.device.state import FEATURES, DeviceState, Quantity
from edgewise.errors import ProfileError
from edgewise.predict import fitting
from edgewise.predict.fitted import FORMAT, FittedPredictor
from edgewise.predict.fitting import fit_kind
from edgewise.predict.samples_file import load_samples, save_samples
from edgewise.predict.state_samples import StateSamples
from edgewise.predict.stored import write_stored

Synthetic = Callable[..., StateSamples]

SOME = np.random.default_rng(3).permutation(2376)


@pytest.fixture(scope="module", autouse=True)
def _short_training() -> Iterator[None]:
    """How well the network learns joules is asked elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_ENERGY_STEPS", 50)
        yield


@pytest.fixture(scope="module")
def fitted(synthetic: Synthetic) -> FittedPredictor:
    return fit_kind("physical", synthetic(joules=True).take(SOME[:300]), coverage=0.951)


def device_state(**known: float) -> DeviceState:
    values = dict(zip(FEATURES, (0.5, 0.6, 0.7, 0.1, 0.2, 1.0), strict=True)) | known
    return DeviceState(at_s=7.0, quantities={n: Quantity.ok(v) for n, v in values.items()})


def without(name: str, reason: str = "gone") -> DeviceState:
    state = device_state()
    return DeviceState(
        at_s=state.at_s,
        quantities={**state.quantities, name: Quantity.missing("masked", reason)},
    )


def test_a_state_gives_costs_of_stages_and_heads(fitted: FittedPredictor) -> None:
    costs = fitted.predict(device_state())
    seconds = fitted.predictor.predict(np.array([0.5, 0.6, 0.7, 0.1, 0.2]))

    assert costs.at_s == 7.0
    assert np.array_equal(costs.stage_s, seconds[:6])
    assert np.array_equal(costs.head_s, seconds[6:])
    assert costs.stage_j is not None
    assert costs.head_j is not None
    assert costs.stage_j == pytest.approx(2 * costs.stage_s, rel=0.02)
    assert len(costs.head_j) == 3
    assert np.array_equal(fitted.upper_s(device_state()), seconds * fitted.upper_ratio)


@pytest.mark.parametrize("name", FEATURES[:5])
def test_a_feature_gone_missing_never_makes_a_prediction_hopeful(
    fitted: FittedPredictor, name: str
) -> None:
    known = fitted.predict(device_state())
    costs = fitted.predict(without(name))

    assert (costs.stage_s >= known.stage_s - 1e-12).all()
    assert (costs.head_s >= known.head_s - 1e-12).all()
    said = fitted.explain(without(name))
    assert any(
        line.startswith(f"{name} is not known (gone): taken at its slowest") for line in said
    )


def test_what_a_prediction_rests_on_is_said(fitted: FittedPredictor) -> None:
    said = fitted.explain(device_state())

    assert said[0].startswith("physical predictor (simulated) reads cpu.frequency_ratio, ")
    assert said[1:] == ["cpu.quota_ratio was not used: the same in all states: 1"]


@pytest.mark.parametrize("kind", ["static", "lut", "physical", "mlp"])
def test_what_is_saved_is_loaded_again(synthetic: Synthetic, tmp_path: Path, kind: str) -> None:
    options = {"steps": 20} if kind == "mlp" else {}
    saved = fit_kind(
        kind,
        synthetic(joules=True).take(SOME[:200]),
        coverage=0.95,
        facts={"model": "net"},
        options=options,
    )
    saved.save(tmp_path / "p.npz")
    loaded = FittedPredictor.load(tmp_path / "p.npz")

    state = device_state()
    assert np.array_equal(loaded.upper_s(state), saved.upper_s(state))
    assert loaded.predict(state).stage_j == pytest.approx(saved.predict(state).stage_j)
    assert (loaded.level, loaded.coverage, loaded.provenance) == (0.95, 0.95, "simulated")
    assert loaded.left_out == saved.left_out
    assert loaded.facts == saved.facts
    assert loaded.explain(state) == saved.explain(state)
    if kind in {"physical", "mlp"}:
        assert saved.num_bytes <= 100 * 1024


def test_every_cut_of_a_file_is_refused(fitted: FittedPredictor, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    fitted.save(path)
    data = path.read_bytes()

    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(ProfileError):
            FittedPredictor.load(path)


def test_flipped_bytes_are_refused_or_change_nothing(
    fitted: FittedPredictor, tmp_path: Path
) -> None:
    path = tmp_path / "p.npz"
    fitted.save(path)
    data = path.read_bytes()
    state = device_state()

    for at in range(0, len(data), 41):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            loaded = FittedPredictor.load(path)
        except ProfileError:
            continue
        assert np.array_equal(loaded.upper_s(state), fitted.upper_s(state))


def test_files_of_another_kind_are_refused(
    fitted: FittedPredictor, synthetic: Synthetic, tmp_path: Path
) -> None:
    path = tmp_path / "other.npz"
    with pytest.raises(ProfileError, match="cannot read"):
        FittedPredictor.load(path)
    path.write_text("hello")
    with pytest.raises(ProfileError, match="cannot read"):
        FittedPredictor.load(path)
    np.savez(path, a=np.ones(3))
    with pytest.raises(ProfileError, match="has no header"):
        FittedPredictor.load(path)
    save_samples(synthetic().take(SOME[:3]), path)
    with pytest.raises(ProfileError, match="'edgewise-state-samples', expected"):
        FittedPredictor.load(path)
    fitted.save(path)
    with pytest.raises(ProfileError, match="'edgewise-predictor', expected"):
        load_samples(path)
    write_stored(path, {}, {}, format_name=FORMAT, version=99)
    with pytest.raises(ProfileError, match="version 99"):
        FittedPredictor.load(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "nonsense"}, "unknown kind"),
        ({"features": []}, "values for missing features"),
        ({"units": ["stage:0"]}, "upper ratios"),
        ({"level": None}, "damaged"),
        ({"facts": {}, "units": 3}, "damaged"),
    ],
    ids=["kind", "features", "units", "level", "type"],
)
def test_headers_that_do_not_fit_their_arrays_are_refused(
    fitted: FittedPredictor, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "p.npz"
    fitted.save(path)
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    header = json.loads(arrays.pop("header").tobytes()) | change
    header.pop("format")
    version = header.pop("format_version")
    write_stored(path, arrays, header, format_name=FORMAT, version=version)

    with pytest.raises(ProfileError, match=said):
        FittedPredictor.load(path)


def test_weights_that_are_not_numbers_are_refused(fitted: FittedPredictor, tmp_path: Path) -> None:
    broken = dataclasses.replace(fitted, upper_ratio=np.full(9, np.nan))
    broken.save(tmp_path / "p.npz")

    with pytest.raises(ProfileError, match="holds NaN"):
        FittedPredictor.load(tmp_path / "p.npz")


def test_a_file_is_replaced_whole_or_not_at_all(fitted: FittedPredictor, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    fitted.save(path)
    fitted.save(path)

    assert [each.name for each in tmp_path.iterdir()] == ["p.npz"]
    with pytest.raises(ProfileError, match="cannot write"):
        fitted.save(tmp_path / "missing" / "p.npz")


@pytest.mark.parametrize("joules", [False, True], ids=["without a meter", "with a meter"])
def test_samples_come_back_as_they_were(
    synthetic: Synthetic, tmp_path: Path, *, joules: bool
) -> None:
    samples = synthetic(joules=joules).take(SOME[:5])
    samples.seconds[0, 1, 2] = np.nan
    save_samples(samples, tmp_path / "s.npz")
    loaded = load_samples(tmp_path / "s.npz")

    assert np.array_equal(loaded.seconds, samples.seconds, equal_nan=True)
    assert np.array_equal(loaded.states, samples.states)
    assert (loaded.joules is None) == (not joules)
    assert (loaded.features, loaded.units) == (samples.features, samples.units)
    assert (loaded.provenance, loaded.elapsed_s) == ("simulated", None)


def test_there_is_no_file_of_no_samples(synthetic: Synthetic, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no samples"):
        save_samples(synthetic().take(SOME[:0]), tmp_path / "s.npz")
