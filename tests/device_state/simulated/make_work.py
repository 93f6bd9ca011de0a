"""Makes the work files of the simulated devices: how much each stage and head has to do.

Run as a program, it writes them again, which takes a minute:
``python tests/device_state/simulated/make_work.py``. The networks of images come from Edgewise's
own graphs, the language model from its published shapes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgewise.device import simulated
from edgewise.frontends.zoo import build_backbone
from edgewise.model import StagedModel
from edgewise.model.accounting import llama_layer_weights
from edgewise.model.graph import Graph, Op
from edgewise.model.heads import HeadSpec

FOLDER = Path(simulated.__file__).parent / "data"
HEAD_WIDTH = 576
"""Hidden width of the paper's CNN heads, inferred from its table 6."""

HEAD_LAUNCHES = 10
"""1x1 convolution, norm, ReLU, pooling, linear; softmax, maximum, index; two copies to the host."""

# Kernels that transformers launches for one token with a cache, as `count_llama_launches` finds.
LLAMA_LAYER_LAUNCHES = 40
LLAMA_EMBEDDING_LAUNCHES = 13  # embedding, positions, rotary table
LLAMA_HEAD_LAUNCHES = 12  # norm 8, product, argmax; two copies to the host
VIEWS = {
    "_unsafe_view", "alias", "detach", "expand", "lift_fresh", "permute", "select", "slice",
    "split", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip


def unit(name: str, launches: int, flops: float, traffic_bytes: float) -> dict[str, Any]:
    return {
        "name": name,
        "launches": launches,
        "flops": round(flops),
        "traffic_bytes": round(traffic_bytes),
    }


def cnn_work(name: str, exits: int = 8) -> dict[str, Any]:
    """Work of a network of images in half precision, exits spaced by FLOPs.

    A launch is an operator that computes. Weights and each map written go through memory; a map
    just written is read from the cache (none exceeds 1.6 MB in half precision).
    """
    whole = build_backbone(name).stage(exits)
    maps = [c.tensor for c in whole.legal_cuts() if math.prod(c.tensor.shape[2:]) > 1]
    # The network's own classifier is left out: each exit has a head of the same shape.
    model = StagedModel.from_boundaries(
        whole.source,
        [*(s.stop.name for s in whole.stages[:-1]), maps[-1].name],
        name=name,
        num_classes=1000,
    )
    graph = model.source.graph
    stages, heads = [], []
    for stage in model.stages:
        between = [graph.ops[i] for i in graph.between(stage.start.name, stage.stop.name)]
        ops = [op for op in between if op.kind != "constant" and not op.is_view]
        traffic_bytes = (stage.weight_bytes + _written_bytes(graph, ops)) / 2
        stages.append(unit(f"stage:{stage.index}", len(ops), stage.flops, traffic_bytes))
        spec = HeadSpec(
            kind="conv", feature_shape=stage.stop.shape, width=HEAD_WIDTH, num_classes=1000
        )
        values = HEAD_WIDTH * (spec.channels + 1000) + 3 * HEAD_WIDTH * spec.positions
        heads.append(unit(f"head:{stage.index}", HEAD_LAUNCHES, spec.flops, 2 * values))
    return {
        "model": name,
        "kind": "image",
        "precision": "float16",
        "made_by": "Edgewise's own graph of the network",
        "units": stages + heads,
    }


def llama_work() -> dict[str, Any]:
    """Work of one token of LLaMA-3.2-1B in bfloat16 with short context; the head is shared."""
    hidden, intermediate, vocabulary, layers, positions = 2048, 8192, 128256, 16, 256
    weights = llama_layer_weights(
        hidden=hidden, intermediate=intermediate, num_heads=32, num_kv_heads=8, head_dim=64
    )
    cached = 2 * 8 * 64 * positions
    layer_bytes = 2 * (weights + cached)
    layer_flops = 2 * weights + 4 * hidden * positions
    stages = [
        unit(
            f"stage:{k}",
            LLAMA_LAYER_LAUNCHES + (LLAMA_EMBEDDING_LAUNCHES if k == 0 else 0),
            layer_flops,
            layer_bytes,
        )
        for k in range(layers)
    ]
    head = hidden * vocabulary
    heads = [unit(f"head:{k}", LLAMA_HEAD_LAUNCHES, 2 * head, 2 * head) for k in range(layers)]
    return {
        "model": "llama-3.2-1b",
        "kind": "token",
        "precision": "bfloat16",
        "made_by": "its published shapes, one token, 256 cached positions",
        "units": stages + heads,
    }


def count_llama_launches(num_layers: int) -> int:
    """Operators other than views that one token costs a small Llama of that many layers."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    dispatch: Any = importlib.import_module("torch.utils._python_dispatch")  # has no public name

    class Counter(dispatch.TorchDispatchMode):  # type: ignore[misc]  # torch is imported late
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func._schema.name.partition("::")[2] not in VIEWS
            return func(*args, **(kwargs or {}))

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    cache = transformers.DynamicCache(config=config)
    renamed = "cache" in inspect.signature(model.forward).parameters
    kept = {"cache" if renamed else "past_key_values": cache}
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), use_cache=True, **kept)
        with Counter() as counter:
            answer = model(torch.tensor([[4]]), use_cache=True, **kept)
            answer.logits[:, -1].argmax(-1)
    return int(counter.count)


def write(work: dict[str, Any]) -> None:
    path = FOLDER / f"{work['model']}.json"
    path.write_text(json.dumps(work, indent=1) + "\n", encoding="utf-8")


def _written_bytes(graph: Graph, ops: Iterable[Op]) -> int:
    return sum(graph.tensors[name].nbytes for op in ops for name in op.outputs)


if __name__ == "__main__":
    for each in (cnn_work("resnet50"), cnn_work("mobilenet_v2"), llama_work()):
        write(each)
