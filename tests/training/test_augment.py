from __future__ import annotations

import numpy as np

from edgewise.training.augment import crop_and_flip

IMAGES = np.arange(1, 2 * 5 * 4 * 3 + 1, dtype=np.uint8).reshape(2, 5, 4, 3)


def test_without_padding_and_flips_images_stay_as_they_are() -> None:
    same = crop_and_flip(IMAGES, padding=0, flip=False, rng=np.random.default_rng(0))

    np.testing.assert_array_equal(same, IMAGES)
    assert not np.shares_memory(same, IMAGES)


def test_every_result_is_a_shifted_image_with_black_outside_mirrored_or_not() -> None:
    many = np.repeat(IMAGES[:1], 200, axis=0)
    moved = crop_and_flip(many, padding=1, flip=True, rng=np.random.default_rng(0))
    padded = np.pad(IMAGES[0], ((1, 1), (1, 1), (0, 0)))
    possible = [padded[r : r + 5, c : c + 4] for r in range(3) for c in range(3)]
    possible += [p[:, ::-1] for p in possible]
    seen = {next(k for k, p in enumerate(possible) if np.array_equal(p, m)) for m in moved}

    assert len(seen) == 18


def test_the_same_seed_moves_images_the_same_way() -> None:
    one, two = (
        crop_and_flip(IMAGES, padding=2, flip=True, rng=np.random.default_rng(5)) for _ in range(2)
    )

    np.testing.assert_array_equal(one, two)
