"""The records that decoding shares: cache and exits."""

from __future__ import annotations

import numpy as np
import pytest

from edgewise.errors import ConfigError, ModelError, ShapeError
from edgewise.model.decoding import AffineExit, KvCache, LanguageExits, check_exit_layers


def test_a_crop_makes_later_cells_absent_in_every_layer() -> None:
    cache = KvCache(layers=3, kv_heads=1, head_dim=2, capacity=8)
    cache.present[:, :5] = True
    cache.length = 5

    cache.crop(2)

    assert cache.length == 2
    assert cache.left == 6
    assert cache.present[:, :2].all()
    assert not cache.present[:, 2:].any()
    assert cache.whole(1, 2)
    assert not cache.whole(1, 3)


def test_a_crop_beyond_the_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot crop 0 tokens to 1"):
        KvCache(layers=1, kv_heads=1, head_dim=1, capacity=4).crop(1)


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity 0"):
        KvCache(layers=1, kv_heads=1, head_dim=1, capacity=0)


def test_the_whole_depth_is_always_an_exit() -> None:
    assert check_exit_layers((3, 1), depth=4) == (1, 3, 4)
    assert check_exit_layers((), depth=4) == (4,)
    assert check_exit_layers((4,), depth=4) == (4,)


@pytest.mark.parametrize("layers", [(0,), (-1,), (5,), (2, 2), (True,)], ids=str)
def test_an_exit_outside_the_model_or_twice_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="1 to 4 layers"):
        check_exit_layers(layers, depth=4)


def test_a_map_whose_arrays_do_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"found \[2, 3\] and \[3\]"):
        AffineExit(layer=1, weight=np.zeros((2, 3), np.float32), bias=np.zeros(3, np.float32))


def test_a_temperature_of_zero_is_refused() -> None:
    eye, zero = np.eye(2, dtype=np.float32), np.zeros(2, np.float32)

    with pytest.raises(ConfigError, match="temperature above 0"):
        AffineExit(layer=1, weight=eye, bias=zero, temperature=0.0)


def test_exits_of_other_weights_are_refused() -> None:
    exits = LanguageExits(model="tiny", digest="a" * 64, affine={})

    exits.check("a" * 64)

    with pytest.raises(ModelError, match="'tiny' with weights aaaaaaaaaaaa, found bbbbbbbbbbbb"):
        exits.check("b" * 64)
