"""A peer decodes on demand, in the Python that has it: run as a script, imports nothing of ours.

Arguments: which peer, then its own. Lines in: the prompt's token ids, then numbers of tokens. Lines
out: ``ready VERSION``, then for each number a JSON object of seconds per token and token ids, or
``error: ...``. It ends when its input does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int], int], tuple[float, list[int]]]


def _llama(path: str, threads: str) -> tuple[str, Decode]:
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]

    count = int(threads)
    model: Any = llama_cpp.Llama(
        path, n_ctx=512, n_threads=count, n_threads_batch=count, verbose=False
    )

    def decode(prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        model.reset()
        model.eval(list(prompt))
        ids, spent_s = [], 0.0
        for _ in range(tokens):
            # Which token is not timed: a decoder would do it in C.
            ids.append(int(model.sample(temp=0.0)))
            began_s = time.perf_counter()
            model.eval(ids[-1:])
            spent_s += time.perf_counter() - began_s
        return spent_s / tokens, ids

    return f"llama-cpp-python {llama_cpp.__version__}", decode


def _economize(folder: str, threads: str, technique: str, layer: str) -> tuple[str, Decode]:
    import economize  # type: ignore[import-not-found, unused-ignore]
    import torch
    import transformers

    torch.set_num_threads(int(threads))
    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    base = library.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    ).eval()
    depth = base.config.num_hidden_layers
    if technique == "early_exit":
        from economize.techniques.early_exit import (  # type: ignore[import-not-found, unused-ignore]
            EarlyExitConfig,
        )

        config = EarlyExitConfig(exit_layer=int(layer), head="shared")
    elif technique == "layer_skip":
        from economize.techniques.layer_skip import (  # type: ignore[import-not-found, unused-ignore]
            LayerSkipConfig,
        )

        config = LayerSkipConfig(num_skip=depth - int(layer), search="uniform")
    else:
        raise SystemExit(f"error: no technique {technique}")
    model = economize.apply(base, config)

    def tpot_s(decode: Callable[[int], Any], tokens: int) -> tuple[float, list[int]]:
        # It says nothing between tokens: what one token takes, with the prompt, is taken off.
        began_s = time.perf_counter()
        decode(1)
        middle_s = time.perf_counter()
        found = decode(tokens + 1)
        whole_s = time.perf_counter() - middle_s
        ids = [int(t) for t in found.tokens]
        return (whole_s - (middle_s - began_s)) / max(1, len(ids) - 1), ids

    def decode(prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        ids = torch.tensor(list(prompt))
        with torch.inference_mode():
            return tpot_s(lambda count: model.decode(ids, count), tokens)

    return f"economize {economize.__version__} {technique}", decode


PEERS: dict[str, Callable[..., tuple[str, Decode]]] = {"llama": _llama, "economize": _economize}


def main(arguments: Sequence[str]) -> int:
    """Serve until the input ends."""
    try:
        version, decode = PEERS[arguments[0]](*arguments[1:])
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side is told
        _say(f"error: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return 1
    _say(f"ready {version}")
    prompt = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        try:
            seconds, ids = decode(prompt, int(line))
        except Exception as error:  # noqa: BLE001 - as above
            _say(f"error: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return 1
        _say(json.dumps({"tpot_s": seconds, "ids": ids}))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
