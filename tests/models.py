"""Small nets of many families, for tests: random weights of sensible size, fixed by a seed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to make a net, and what it is given.

    Attributes:
        build: Makes it, after the seed is set.
        shape: Of one sample.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 16, 16)


class ConvUnit(nn.Sequential):
    """Convolution, normalisation, activation."""

    def __init__(self, inputs: int, outputs: int, *, size: int = 3, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Classifier(nn.Sequential):
    """Pool, flatten, drop, answer."""

    def __init__(self, channels: int, classes: int = 7) -> None:
        super().__init__(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels, classes)
        )


class Chain(nn.Sequential):
    """Four convolutions in a row."""

    def __init__(self) -> None:
        super().__init__(
            ConvUnit(3, 8),
            ConvUnit(8, 16, stride=2),
            ConvUnit(16, 16),
            ConvUnit(16, 24, stride=2),
            Classifier(24),
        )


class Residual(nn.Module):
    """Three residual blocks; between two of them one tensor crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvUnit(3, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(ConvUnit(8, 8), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
            for _ in range(3)
        )
        self.classifier = Classifier(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        answer: Tensor = self.classifier(x)
        return answer


class DenseBlock(nn.Module):
    """Every layer reads all earlier layers."""

    def __init__(self, channels: int, growth: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + k * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels + k * growth, growth, 3, padding=1),
            )
            for k in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return x


class DenseNetLike(nn.Sequential):
    """Dense blocks with a transition between them."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            DenseBlock(8),
            nn.Conv2d(20, 8, 1),
            nn.AvgPool2d(2),
            DenseBlock(8),
            nn.BatchNorm2d(20),
            nn.ReLU(),
            Classifier(20),
        )


class InceptionBlock(nn.Module):
    """Parallel branches, joined; one is split into chunks on the way."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = ConvUnit(channels, 4, size=1)
        self.three = nn.Sequential(ConvUnit(channels, 4, size=1), ConvUnit(4, 6))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), ConvUnit(channels, 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.three(x).chunk(2, dim=1)
        return torch.cat([self.one(x), first, second * 0.5, self.pooled(x)], dim=1)


class InceptionLike(nn.Module):
    """Three inception blocks and an auxiliary answer that comes second, as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvUnit(3, 8, stride=2)
        self.blocks = nn.ModuleList([InceptionBlock(8), InceptionBlock(14), InceptionBlock(14)])
        self.classifier = Classifier(14)
        self.auxiliary = Classifier(14)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        return self.classifier(self.blocks[2](x)), self.auxiliary(x)


class InPlaceEverything(nn.Module):
    """Writes through operands, through views and through slices, and reads what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8, 8))
        self.drop = nn.Dropout(0.5, inplace=True)
        self.classifier = Classifier(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[0](x)
        x.relu_().add_(0.25)
        x = self.drop(x)
        x[:, :1].mul_(2.0)
        y = self.convs[1](x).relu_()
        flat = y.flatten(2)
        y.add_(1.0)  # seen through the view
        x = self.convs[2](y + flat.mean(2)[:, :, None, None])
        first, second = x.chunk(2, dim=1)
        first.sigmoid_()
        second += 0.5
        x.clamp_(-1.0, 1.0)
        x[:, 2, :, :] = 0.125
        answer: Tensor = self.classifier(self.convs[3](x).relu_())
        return answer


class Attention(nn.Module):
    """Tokens with a class token and positions made early and read late; sizes asked for."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        batch, length, width = tokens.shape
        positions = torch.arange(length + 1, dtype=torch.float32) / (length + 1)
        tokens = torch.cat([self.token.expand(batch, -1, -1), tokens], dim=1)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            tokens = tokens + positions[None, :, None]
            parts = qkv(self.norm(tokens)).view(batch, length + 1, 3, self.heads, -1)
            q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            tokens = tokens + mixed.transpose(1, 2).reshape(batch, length + 1, width)
            tokens = tokens + nn.functional.gelu(mlp(tokens))
        answer: Tensor = self.head(tokens[:, 0])
        return answer


class SkipToTheEnd(nn.Module):
    """The input is read again at the end: no place where one tensor crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.early = nn.Linear(3 * 16 * 16, 7)
        self.late = nn.Linear(3 * 16 * 16, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv in self.convs:
            y = torch.relu(conv(y))
        answer: Tensor = self.early(x.flatten(1)) + self.late(y.flatten(1))
        return answer


def from_transformers(name: str, **settings: Any) -> nn.Module:
    """An image classifier of transformers without pretrained weights."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{name}Config")(num_labels=7, **settings)
    module: nn.Module = getattr(transformers, f"{name}ForImageClassification")(config)
    return module


def hf_resnet() -> nn.Module:
    return from_transformers("ResNet", embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2])


def hf_mobilenet() -> nn.Module:
    return from_transformers("MobileNetV2", depth_multiplier=0.25, image_size=32)


def hf_vit() -> nn.Module:
    return from_transformers(
        "ViT",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
    )


FAMILIES = {
    "chain": Family(build=Chain),
    "residual": Family(build=Residual),
    "dense": Family(build=DenseNetLike),
    "inception": Family(build=InceptionLike),
    "in_place": Family(build=InPlaceEverything),
    "attention": Family(build=Attention),
    "hf_resnet": Family(build=hf_resnet, shape=(3, 32, 32)),
    "hf_mobilenet": Family(build=hf_mobilenet, shape=(3, 32, 32)),
    "hf_vit": Family(build=hf_vit),
}


def lively(module: nn.Module) -> nn.Module:
    """Give convolutions and norms weights under which signals neither die nor explode."""
    for m in module.modules():
        if isinstance(m, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias, std=0.1)
            assert m.running_mean is not None
            assert m.running_var is not None
            nn.init.normal_(m.running_mean, std=0.1)
            nn.init.uniform_(m.running_var, 0.5, 1.5)
    return module


def make(family: str, *, seed: int = 0) -> nn.Module:
    """A net of a family, in training mode as users have it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return lively(FAMILIES[family].build())


def example(family: str, batch: int = 1) -> Tensor:
    """A seeded input."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand((batch, *FAMILIES[family].shape), generator=generator) * 2 - 1


def logits(module: nn.Module, x: Tensor) -> Tensor:
    """What the module answers in evaluation mode; its mode is given back."""
    training = module.training
    module.eval()
    with torch.no_grad():
        found = module(x.clone())
    module.train(training)
    if isinstance(found, tuple):
        found = found[0]
    answer: Tensor = getattr(found, "logits", found)
    return answer


def through(pieces: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """Run pieces one after another."""
    with torch.no_grad():
        for piece in pieces:
            x = piece(x)
    return x
