"""Other decoders beside ours: transformers in this process, others in processes of their own.

A peer that another Python has decodes on demand, so that it takes turns with ours and sleeps
meanwhile. Which Python that is, an environment variable says.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from edgewise.backends.threads import thread_environment
from edgewise.errors import BackendError, BackendUnavailable
from edgewise.frontends.language.pull import PUBLISHED

if TYPE_CHECKING:
    from edgewise.model.language import LanguageModel

LLAMA_PYTHON = "EDGEWISE_LLAMA_PYTHON"
ECONOMIZE_PYTHON = "EDGEWISE_ECONOMIZE_PYTHON"

_WORKER = Path(__file__).with_name("_language_peer.py")
_START_TIMEOUT_S = 120.0
_TURN_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Some tokens after a prompt.

    Attributes:
        tpot_s: Seconds per token after the first.
        ids: Tokens.
    """

    tpot_s: float
    ids: tuple[int, ...]


class ChildPeer:
    """A process that decodes when it is asked to, and computes nothing else.

    Args:
        command: Starts it; see the worker's own account of the lines it reads and writes.
        prompt: Token ids that every turn begins with.

    Attributes:
        version: As it says.

    Raises:
        BackendUnavailable: It does not start; its own words are in the message.
    """

    def __init__(self, command: Sequence[str], prompt: Sequence[int]) -> None:
        # Our rules for threads would slow it down: it waits as its makers want.
        ours = thread_environment(1)
        environment = {k: v for k, v in os.environ.items() if k not in ours}
        environment.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - what the user named, our own worker
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
                env=environment,
            )
        except OSError as error:
            raise BackendUnavailable(f"{command[0]} does not start: {error.strerror}") from error
        said = ""
        try:
            said = self._answer(_START_TIMEOUT_S)
        finally:
            if not said.startswith("ready "):
                self.close()
        if not said.startswith("ready "):
            raise BackendUnavailable(said.removeprefix("error: ") or "it ended at its start")
        self.version = said.removeprefix("ready ")
        self._ask(json.dumps([int(i) for i in prompt]))

    def decode(self, count: int) -> Turn:
        """Begin with the prompt again and add some tokens.

        Raises:
            BackendError: It failed.
        """
        self._ask(str(count))
        said = self._answer(_TURN_TIMEOUT_S)
        if not said.startswith("{"):
            raise BackendError(f"{self.version}: {said.removeprefix('error: ') or 'it ended'}")
        found = json.loads(said)
        return Turn(tpot_s=float(found["tpot_s"]), ids=tuple(found["ids"]))

    def close(self) -> None:
        """End it."""
        process = self._process
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _answer(self, timeout_s: float) -> str:
        out = self._process.stdout
        assert out is not None  # noqa: S101 - opened as a pipe
        # One line follows each question, so none can wait in the buffer unseen.
        if not select.select([out], [], [], timeout_s)[0]:
            self._process.kill()
            return f"error: no answer within {timeout_s:g} s"
        return out.readline().strip()


def open_llama(
    prompt: Sequence[int], *, threads: int, model: str = "smollm2-135m", python: str | None = None
) -> ChildPeer:
    """llama.cpp on the package's own 4-bit file.

    Args:
        prompt: Token ids.
        threads: Of its calls.
        model: Of `PUBLISHED`.
        python: Which has llama-cpp-python; by default what the environment names, or this one.

    Raises:
        BackendUnavailable: It, or the model's package, is not installed.
    """
    about = PUBLISHED[model]
    spec = importlib.util.find_spec(about.module)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    path = next((p for p in (Path(f) / about.file for f in folders) if p.is_file()), None)
    if path is None:
        raise BackendUnavailable(f"the file {about.file} is not installed", help=about.install)
    python = _python(
        python, LLAMA_PYTHON, module="llama_cpp", install="pip install llama-cpp-python"
    )
    return ChildPeer([python, str(_WORKER), "llama", str(path), str(threads)], prompt)


def open_economize(  # noqa: PLR0913 - what it drafts, and how
    folder: Path,
    prompt: Sequence[int],
    *,
    threads: int,
    technique: str,
    layer: int,
    python: str | None = None,
) -> ChildPeer:
    """Drafters of economize on a folder of transformers, full precision.

    Args:
        folder: Of the model.
        prompt: Token ids.
        threads: Of its calls.
        technique: ``"early_exit"`` drafts after ``layer`` layers, ``"layer_skip"`` with as many
            layers, the others left out evenly.
        layer: See there.
        python: Which has economize; by default what the environment names, or this one.

    Raises:
        BackendUnavailable: It is not installed, or refuses.
    """
    python = _python(python, ECONOMIZE_PYTHON, module="economize", install="pip install economize")
    arguments = ["economize", str(folder), str(threads), technique, str(layer)]
    return ChildPeer([python, str(_WORKER), *arguments], prompt)


def _python(given: str | None, variable: str, *, module: str, install: str) -> str:
    found = given or os.environ.get(variable)
    if found:
        return found
    if importlib.util.find_spec(module) is None:
        raise BackendUnavailable(
            f"{module} is not installed here, and {variable} names no Python that has it",
            help=f"python3 -m venv peer && peer/bin/{install} && export {variable}=peer/bin/python",
        )
    return sys.executable


# --- transformers, in this process -----------------------------------------------------------


def build_transformers(model: LanguageModel) -> Any:
    """The library's model on the very arrays of ours: nothing is copied.

    Raises:
        BackendUnavailable: transformers is not installed.
    """
    from edgewise.backends.base import import_runtime
    from edgewise.runtime.dispatching.build import build_model

    torch: Any = import_runtime("torch", backend="torch:cpu", extra="torch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        weights = {name: torch.from_numpy(w) for name, w in model.weights.items()}
    with torch.device("meta"):
        built = build_model(model.architecture)
    # Angles are no weights, and were left without values.
    built.model.rotary_emb = type(built.model.rotary_emb)(built.config)
    built.load_state_dict(weights, assign=True, strict=False)
    built.tie_weights()
    return built


class TransformersPeer:
    """The library's own greedy ``generate`` with its cache.

    Args:
        model: See `build_transformers`.
        prompt: Token ids.
        options: Of ``generate``; ``assistant_early_exit`` for one.
    """

    def __init__(self, model: Any, prompt: Sequence[int], **options: Any) -> None:
        self._model, self._prompt, self._options = model, list(prompt), options

    def decode(self, count: int) -> Turn:
        """Begin with the prompt again and add some tokens after the first.

        Raises:
            BackendError: It failed.
        """
        import torch

        stamps: list[float] = []

        class Stamps:
            """A streamer that only looks at the clock; the prompt comes first."""

            def put(self, value: Any) -> None:
                stamps.extend([time.perf_counter()] * int(value.numel()))

            def end(self) -> None:
                pass

        ids = torch.tensor([self._prompt])
        settings: dict[str, Any] = {
            "do_sample": False,
            "max_new_tokens": count + 1,
            "min_new_tokens": count + 1,
            "pad_token_id": 0,
            "eos_token_id": None,
            "use_cache": True,
        }
        try:
            with torch.inference_mode(), _quiet():
                found = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    streamer=Stamps(),
                    **(settings | self._options),
                )
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            raise BackendError(f"transformers: {type(error).__name__}: {said}") from error
        times = stamps[len(self._prompt) :]
        new = tuple(int(t) for t in found[0, len(self._prompt) :])
        return Turn(tpot_s=(times[-1] - times[0]) / max(1, len(times) - 1), ids=new)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's advice."""
    import transformers

    logging: Mapping[str, Any] = vars(transformers.utils.logging)
    before = logging["get_verbosity"]()
    logging["set_verbosity_error"]()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging["set_verbosity"](before)
