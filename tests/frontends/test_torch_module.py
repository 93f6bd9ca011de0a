from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgewise.errors import BackendUnavailable, ConfigError, ModelError, ShapeError
from edgewise.frontends.torch_module import TorchSource
from edgewise.model import StagedModel, legal_cuts

FAMILIES = (
    "chain", "residual", "dense", "inception", "in_place", "attention", "hf_resnet", "hf_mobilenet",
    "hf_vit",
)  # fmt: skip
SLOW_TO_EXPORT = ("chain", "inception", "hf_resnet", "hf_mobilenet", "hf_vit")
STAGES_AT_LEAST = {"inception": 3, "hf_resnet": 2, "residual": 3, "in_place": 2}


def torch_chain(model: StagedModel) -> list[Callable[[Any], Any]]:
    found = [model.source.torch_segment(s.start.name, s.stop.name) for s in model.stages]
    assert None not in found
    return found  # type: ignore[return-value]  # just asserted


def onnx_chain(model: StagedModel, x: Any, *, optimised: bool) -> Any:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    values = x.numpy()
    for stage in model.stages:
        proto = model.source.onnx_segment(stage.start.name, stage.stop.name, batch=len(values))
        session = runtime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        (values,) = session.run(None, {proto.graph.input[0].name: values})
    return values


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_chain_of_stages_answers_exactly_as_the_module(
    family: str, batch: int, nets: Any, staged: Any
) -> None:
    model, x = staged(family), nets.example(family, batch)
    expected = nets.logits(nets.make(family), x)

    found = nets.through(torch_chain(model), x)

    assert len(model.stages) >= STAGES_AT_LEAST.get(family, 4)
    assert float(expected.std()) > 1e-3, "a net that answers nothing proves nothing"
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_cut_at_every_legal_place_it_still_answers_exactly(
    family: str, nets: Any, staged: Any
) -> None:
    source = staged(family).source
    names = [c.tensor.name for c in legal_cuts(source.graph)]
    model = StagedModel.from_source(source, exits=names, name=family)
    x = nets.example(family, 2)

    found = nets.through(torch_chain(model), x)

    assert len(model.stages) == len(names) + 1
    np.testing.assert_array_equal(found.numpy(), nets.logits(nets.make(family), x).numpy())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=pytest.mark.slow) if f in SLOW_TO_EXPORT else f  # 3 to 10 s each
        for f in FAMILIES
    ],
)
def test_the_chain_of_onnx_pieces_answers_as_the_module(
    family: str, nets: Any, staged: Any
) -> None:
    model, x = staged(family), nets.example(family, 3)
    expected = nets.logits(nets.make(family), x).numpy()

    for optimised in (False, True):
        found = onnx_chain(model, x, optimised=optimised)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_boundaries_have_the_shapes_that_are_told(family: str, nets: Any, staged: Any) -> None:
    model, x = staged(family), nets.example(family, 2)

    for stage, piece in zip(model.stages, torch_chain(model), strict=True):
        x = nets.through([piece], x)
        assert tuple(x.shape) == (2, *stage.stop.shape[1:])
        assert stage.stop.shape[0] == 1
        assert stage.stop.nbytes == x[0].numel() * x.element_size()


@pytest.mark.parametrize("family", FAMILIES)
def test_contractions_cost_what_torch_counts(family: str, nets: Any, staged: Any) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    graph = staged(family).source.graph
    piece = staged(family).source.torch_segment(graph.inputs[0], graph.outputs[0])
    # The piece, since a module may do more than its answer needs; the kernel that torch can count.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        nets.through([piece], nets.example(family))

    counted = sum(op.flops for op in graph.ops if op.is_contraction)
    assert counted == counter.get_total_flops()
    assert graph.flops >= counted


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_share_out_all_work_and_weights(family: str, nets: Any, staged: Any) -> None:
    model = staged(family)
    parameters = {id(p): p for p in nets.make(family).parameters()}
    read = sum(op.weight_bytes for op in model.source.graph.ops)

    # What depends on no input is made again by each stage that reads it.
    assert model.source.graph.flops <= model.flops <= 1.01 * model.source.graph.flops
    assert read <= sum(s.weight_bytes for s in model.stages) <= 1.01 * read
    assert read <= 4 * sum(p.numel() for p in parameters.values()) * 1.2
    assert [e.depth_ratio for e in model.exits] == sorted(e.depth_ratio for e in model.exits)
    assert model.exits[-1].depth_ratio == pytest.approx(1.0)


def test_the_module_keeps_its_modes_parameters_and_gradients(nets: Any) -> None:
    module = nets.make("residual")
    module.train()
    module.blocks[1].eval()
    module.stem[0].weight.requires_grad_(requires_grad=False)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    modes = [m.training for m in module.modules()]
    wants = [p.requires_grad for p in module.parameters()]

    StagedModel.from_module(module, nets.example("residual", 2), exits=3)

    assert [m.training for m in module.modules()] == modes
    assert [p.requires_grad for p in module.parameters()] == wants
    assert all(p.grad is None for p in module.parameters())
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name].numpy())


def test_the_example_and_later_inputs_are_only_read(nets: Any) -> None:
    module = nets.torch.nn.Sequential(nets.torch.nn.ReLU(inplace=True), nets.Chain())
    x = nets.example("chain", 2)
    before = x.clone()

    model = StagedModel.from_module(module, x, exits=3)
    nets.through(torch_chain(model), x)

    np.testing.assert_array_equal(x.numpy(), before.numpy())


def test_a_tuple_with_one_tensor_is_an_example(nets: Any) -> None:
    model = StagedModel.from_module(nets.make("residual"), (nets.example("residual"),), exits=2)

    assert model.input.shape == (1, 3, 16, 16)
    assert model.num_classes == 7
    assert model.name == "Residual"


def test_staging_twice_gives_the_same_version_and_the_name_does_not_matter(
    nets: Any, staged: Any
) -> None:
    again = StagedModel.from_module(
        nets.make("residual"), nets.example("residual", 3), exits=4, name="another name"
    )

    assert again.version() == staged("residual").version()


def test_another_weight_attribute_head_or_cut_is_another_version(nets: Any, staged: Any) -> None:
    model = staged("residual")
    weights = nets.make("residual")
    weights.blocks[2][1].bias.data[3] += 1e-3
    padding = nets.make("residual")
    padding.stem[0].padding_mode = "circular"
    statistics = nets.make("residual")
    statistics.stem[1].running_mean[0] += 1e-3
    epsilon = nets.make("residual")
    epsilon.stem[1].eps = 1e-3
    example = nets.example("residual")
    versions = [
        model.version(),
        model.with_random_heads(seed=0).version(),
        model.with_random_heads(seed=1).version(),
        model.with_random_heads(kind="conv").version(),
        StagedModel.from_source(model.source, exits=2, name="residual").version(),
        *(
            StagedModel.from_module(m, example, exits=4).version()
            for m in (weights, padding, statistics, epsilon)
        ),
    ]

    assert len(set(versions)) == len(versions)
    assert all(len(v) == 16 and int(v, 16) >= 0 for v in versions)


def test_constants_of_the_forward_belong_to_the_version(nets: Any) -> None:
    torch = nets.torch

    class Shifted(torch.nn.Module):  # type: ignore[misc,name-defined]  # torch is optional here
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.net = nets.make("chain")
            self.register_buffer("shift", torch.tensor([shift, 0.0, 0.0]), persistent=False)

        def forward(self, x: Any) -> Any:
            return self.net(x - self.shift[None, :, None, None])

    versions = {
        StagedModel.from_module(Shifted(s), nets.example("chain"), exits=2).version()
        for s in (0.0, 0.5)
    }

    assert len(versions) == 2


def test_names_of_modules_choose_exits(staged: Any) -> None:
    model = staged("inception", exits=["blocks.0", "blocks.1"])

    assert [e.name for e in model.exits][:2] == ["blocks.0", "blocks.1"]
    assert [s.stop.shape for s in model.stages[:2]] == [(1, 14, 8, 8), (1, 14, 8, 8)]


def test_an_auxiliary_answer_is_left_out(staged: Any) -> None:
    model = staged("inception")
    kinds = [op.kind for op in model.source.graph.ops]

    assert kinds.count("linear") == 1


def test_unknown_names_and_counts_are_refused(staged: Any) -> None:
    with pytest.raises(ConfigError, match=r"'blocks\.7'"):
        staged("inception", exits=["blocks.7"])
    with pytest.raises(ConfigError, match="exits=0"):
        staged("inception", exits=0)
    with pytest.raises(ConfigError, match="fractions"):
        staged("inception", exits=[0.5, 1.01])


def test_one_exit_is_the_whole_model(staged: Any) -> None:
    model = staged("attention", exits=1)

    assert [e.depth_ratio for e in model.exits] == [1.0]
    assert model.has_all_heads


def test_a_skip_from_the_input_to_the_end_leaves_no_cut(nets: Any) -> None:
    module, x = nets.SkipToTheEnd(), nets.example("chain")

    with pytest.raises(ModelError, match="no legal cut") as caught:
        StagedModel.from_module(module, x)
    assert "exits=1" in str(caught.value.help)
    assert StagedModel.from_module(module, x, exits=1).num_exits == 1


def test_dropout_and_in_place_writing_leave_no_operator(staged: Any) -> None:
    kinds = {op.kind for op in staged("in_place").source.graph.ops}

    assert not {k for k in kinds if k.endswith("_") or "dropout" in k or k.startswith("_assert")}


def test_values_with_the_names_that_the_exporter_makes_up_are_kept_apart(
    staged: Any,
) -> None:
    """An in-place relu_ is exported as `relu`, which may be another operator's name already."""
    source = staged("dense").source
    proto = source.onnx_segment(source.graph.inputs[0], source.graph.outputs[0])
    written = [name for node in proto.graph.node for name in node.output]

    assert {"relu", "relu_"} & {name for op in source.graph.ops for name in op.outputs}
    assert len(written) == len(set(written))


def test_an_onnx_piece_is_a_valid_model_of_its_own_with_its_weights_only(staged: Any) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    model = staged("residual")
    sizes = []
    for stage in model.stages:
        proto = model.source.onnx_segment(stage.start.name, stage.stop.name, batch=2)
        onnx.checker.check_model(proto, full_check=True)
        sizes.append(sum(len(t.raw_data) for t in proto.graph.initializer))
        shape = [d.dim_value for d in proto.graph.output[0].type.tensor_type.shape.dim]
        assert shape == [2, *stage.stop.shape[1:]]

    whole = model.source.onnx_segment(model.input.name, model.stages[-1].stop.name)
    everything = sum(len(t.raw_data) for t in whole.graph.initializer)
    assert everything <= sum(sizes) <= everything + 64 * len(sizes)  # shapes may be in several


def test_asking_from_several_threads_exports_once(staged: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = staged("residual")
    stage = model.stages[0]
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(
                lambda _: model.source.torch_segment(stage.start.name, stage.stop.name), range(8)
            )
        )

    assert all(piece is found[0] for piece in found)


class Test_modules_that_cannot_be_staged_say_why:  # noqa: N801 - reads as a sentence
    def test_a_branch_on_the_data(self, nets: Any) -> None:
        class Branching(nets.torch.nn.Module):  # type: ignore[misc]
            def forward(self, x: Any) -> Any:
                return x.flatten(1) if x.sum() > 0 else x.flatten(1) * 2

        with pytest.raises(ModelError, match=r"torch\.export refuses Branching") as caught:
            StagedModel.from_module(Branching(), nets.example("chain"))
        assert caught.value.__cause__ is not None
        assert "from_onnx" in str(caught.value.help)

    def test_a_random_forward(self, nets: Any) -> None:
        class Random(nets.torch.nn.Module):  # type: ignore[misc]
            def forward(self, x: Any) -> Any:
                return (x + nets.torch.rand_like(x)).flatten(1)

        with pytest.raises(ModelError, match="answers otherwise than the module"):
            StagedModel.from_module(Random(), nets.example("chain"))

    def test_an_output_that_is_no_logits(self, nets: Any) -> None:
        module = nets.torch.nn.Conv2d(3, 4, 3)

        with pytest.raises(ModelError, match="logits"):
            StagedModel.from_module(module, nets.example("chain"))

    def test_half_precision(self, nets: Any) -> None:
        module = nets.make("chain").to(nets.torch.bfloat16)

        with pytest.raises(ModelError, match="bfloat16"):
            StagedModel.from_module(module, nets.example("chain").to(nets.torch.bfloat16))

    @pytest.mark.parametrize("what", ["numpy", "vector", "empty", "two"])
    def test_an_example_that_is_not_one_batch(self, nets: Any, what: str) -> None:
        torch = nets.torch
        example = {
            "numpy": np.zeros((1, 3, 16, 16), np.float32),
            "vector": torch.zeros(3),
            "empty": torch.zeros(0, 3, 16, 16),
            "two": (torch.zeros(1, 3, 16, 16), torch.zeros(1)),
        }[what]

        with pytest.raises(ShapeError, match="one example tensor"):
            StagedModel.from_module(nets.make("chain"), example)

    def test_an_example_of_another_size(self, nets: Any) -> None:
        with pytest.raises(ModelError, match=r"torch\.export refuses Chain"):
            StagedModel.from_module(nets.make("chain"), nets.torch.zeros(1, 4, 16, 16))

    def test_torch_missing(self, nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        example = nets.example("chain")
        monkeypatch.setitem(sys.modules, "torch", None)

        with pytest.raises(BackendUnavailable) as caught:
            StagedModel.from_module(object(), example)
        assert caught.value.help == "pip install 'edgewise[torch]'"


def test_a_forward_that_depends_on_the_batch_size_is_staged_for_one_sample(nets: Any) -> None:
    class Squeezing(nets.torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.features = nets.torch.nn.Sequential(nets.ConvUnit(3, 8), nets.ConvUnit(8, 8))
            self.classifier = nets.torch.nn.Linear(8, 7)

        def forward(self, x: Any) -> Any:
            pooled = self.features(x).mean((2, 3), keepdim=True).squeeze()
            return self.classifier(pooled if pooled.ndim == 2 else pooled[None])

    module, x = Squeezing(), nets.example("chain")
    model = StagedModel.from_module(module, x, exits=3)

    found = nets.through(torch_chain(model), x)

    np.testing.assert_array_equal(found.numpy(), nets.logits(module, x).numpy())


def test_a_parametrised_and_shared_layer_is_staged(nets: Any) -> None:
    torch = nets.torch

    class Shared(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.stem = nets.ConvUnit(3, 8)
            self.conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv2d(8, 8, 1))
            self.classifier = nets.Classifier(8)

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            for _ in range(3):
                x = torch.relu(self.conv(x))
            with torch.no_grad():
                x = x * torch.ones(1, 8, 1, 1)
            return self.classifier(x)

    module, x = nets.lively(Shared()), nets.example("chain", 2)
    model = StagedModel.from_module(module, x, exits=4)

    found = nets.through(torch_chain(model), x)

    np.testing.assert_array_equal(found.numpy(), nets.logits(module, x).numpy())
    assert len(model.stages) >= 3


def test_a_deep_copy_of_the_module_may_train_on(nets: Any) -> None:
    module = nets.make("chain")
    model = StagedModel.from_module(copy.deepcopy(module), nets.example("chain"), exits=2)
    before = model.version()
    module[0][0].weight.data.zero_()

    assert model.version() == before


def usable(package: str) -> bool:
    """Whether an optional model library is here and can be imported beside this torch."""
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(package)
    except Exception:  # noqa: BLE001 - torchvision breaks in many ways beside another torch
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "densenet121", "googlenet"])
def test_torchvision_nets_are_staged(nets: Any, name: str) -> None:
    if not usable("torchvision"):
        pytest.skip("torchvision is not installed, or not for this torch")
    torchvision = importlib.import_module("torchvision")
    options = {"init_weights": False} if name == "googlenet" else {}
    module = torchvision.models.get_model(name, weights=None, **options)
    x = nets.torch.rand(1, 3, 224, 224)
    model = StagedModel.from_module(module, x, exits=6)

    found = nets.through(torch_chain(model), x)

    np.testing.assert_array_equal(found.numpy(), nets.logits(module, x).numpy())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["efficientnet_lite0", "mobilenetv2_100", "resnet18"])
def test_timm_nets_are_staged(nets: Any, name: str) -> None:
    if not usable("timm"):
        pytest.skip("timm is not installed, or not for this torch")
    module = importlib.import_module("timm").create_model(name, pretrained=False)
    x = nets.torch.rand(1, 3, 224, 224)
    model = StagedModel.from_module(module, x, exits=6)

    found = nets.through(torch_chain(model), x)

    np.testing.assert_array_equal(found.numpy(), nets.logits(module, x).numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gflops"), [("ResNet", 8.2), ("MobileNetV2", 0.62), ("ViT", 35.0)]
)
def test_full_size_nets_have_eight_exits_and_answer_as_their_stages(
    nets: Any, name: str, gflops: float
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(transformers, f"{name}Config")(num_labels=1000)
    module = nets.lively(getattr(transformers, f"{name}ForImageClassification")(config))
    x = nets.torch.rand(2, 3, 224, 224) * 2 - 1
    model = StagedModel.from_module(module, x)
    expected = nets.logits(module, x)

    found = nets.through(torch_chain(model), x)

    assert model.num_exits == 8
    assert model.flops / 1e9 == pytest.approx(gflops, rel=0.05)
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
    scale = float(expected.abs().max())
    from_onnx = onnx_chain(model, x, optimised=True)
    np.testing.assert_allclose(from_onnx, expected.numpy(), rtol=1e-3, atol=1e-4 * scale)


def test_the_source_alone_can_be_asked(nets: Any) -> None:
    source = TorchSource.export(nets.make("chain"), nets.example("chain"))

    assert source.dynamic_batch
    assert len(source.weights_digest()) == 64
