"""The picture of sparse patterns in docs/."""

from __future__ import annotations

import patterns
import pytest

pytestmark = pytest.mark.skipif(not patterns.PATH.is_file(), reason="not in a checkout")


def test_the_picture_is_that_of_the_maps_of_today():
    assert patterns.PATH.read_text(encoding="utf-8") == patterns.drawing(), "run scripts/patterns.py"


def test_it_draws_the_tiles_of_each_map():
    """Areas of rectangles, in tiles, are the numbers of full and mixed tiles."""
    text = patterns.drawing()
    for index, color in enumerate(patterns.COLORS, start=1):
        paths = [part.split('"')[0] for part in text.split(f'<path fill="{color}" d="')[1:]]
        drawn = [sum(int(one.split("h")[1].split("v")[0]) for one in path.split("z")[:-1]) for path in paths]
        counts = [int((sparse.states == index).sum()) for _, sparse in patterns.maps()]
        assert [pixels // patterns.STEP for pixels in drawn] == [count for count in counts if count]
