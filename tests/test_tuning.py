"""The file of the user's own tiles: several processes save to it, people edit it, and disks lose half of it."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings

import pytest

from fa2cupy import TileConfig
from fa2cupy.families import tuning
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Kernel
from fa2cupy.families.sm80 import SM80
from fa2cupy.families.tuning import save_tuned_tile, tuned_tile
from fa2cupy.settings import tuning_file
from fa2cupy.system.folders import UntrustedError
from fa2cupy.system.locks import file_lock

H100 = DeviceInfo.named("sm_90")
TILE, OTHER = TileConfig(64, 48, 4), TileConfig(64, 80, 4)


def save(head_dim: int = 64, tile: TileConfig = TILE) -> None:
    save_tuned_tile(SM80, Kernel("forward", "float16", head_dim, head_dim), False, H100, tile)


def saved(head_dim: int = 64) -> TileConfig | None:
    return tuned_tile(SM80, Kernel("forward", "float16", head_dim, head_dim), False, H100)


def write(text: str) -> None:
    tuning_file().parent.mkdir(exist_ok=True)
    tuning_file().write_text(text)
    tuning._tuned_tiles.cache_clear()


def messages_of(function) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_processes_that_save_at_once_lose_no_entry(tuning_folder):
    children = []
    for first in range(0, 72, 24):
        child = os.fork()
        if not child:
            status = 1
            try:
                for number in range(first, first + 24):
                    save(number + 1)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert len(json.loads(tuning_file().read_text())) == 72


def test_an_entry_that_another_process_saved_meanwhile_is_kept(tuning_folder):
    save(64)
    entries = json.loads(tuning_file().read_text())
    key, fields = next(iter(entries.items()))
    tuning_file().write_text(json.dumps({**entries, key.replace("/64/", "/32/"): fields}))
    save(96)
    assert saved(32) == saved(64) == saved(96) == TILE


def test_a_lock_that_is_not_given_back_is_an_error_that_names_the_file(tuning_folder, monkeypatch):
    save(64)
    monkeypatch.setattr(tuning, "_LONGEST_SAVE_S", 0.1)
    with file_lock(tuning_folder / "tuning.json.lock", 1), pytest.raises(TimeoutError) as caught:
        save(64, OTHER)
    for part in (str(tuning_file()), "another process", "save again"):
        assert part in str(caught.value)
    assert saved(64) == TILE


def test_saving_waits_for_the_lock(tuning_folder):
    save(64)
    with file_lock(tuning_folder / "tuning.json.lock", 1):
        thread = threading.Thread(target=save, args=(64, OTHER))
        thread.start()
        time.sleep(0.1)
        assert saved(64) == TILE
    thread.join(10)
    assert saved(64) == OTHER


@pytest.mark.parametrize("bad", (7, {"b_r": 64}, {"b_r": 0, "b_c": 1, "num_warps": 1}, {"later": 1}, None))
def test_one_bad_entry_disables_itself_alone_and_is_kept(bad, tuning_folder):
    save(64)
    write(json.dumps({**json.loads(tuning_file().read_text()), "mine": bad}))
    (message,) = messages_of(lambda: [saved(64), saved(32)])
    assert "'mine'" in message
    assert str(tuning_file()) in message
    assert saved(64) == TILE
    save(32)
    assert json.loads(tuning_file().read_text())["mine"] == bad


@pytest.mark.parametrize("text", ('{"a": ', "", "[1]", "\xff", "[" * 100_000))
def test_saving_over_a_damaged_file_keeps_it_under_another_name(text, tuning_folder):
    for number in (1, 2):
        write(text)
        (message,) = messages_of(save)
        kept = tuning_folder / f"tuning.json.damaged-{number}"
        assert kept.read_text() == text
        assert str(tuning_file()) in message
        assert kept.name in message
        assert saved() == TILE


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files belong to nobody here")
@pytest.mark.parametrize("opened", ("tuning.json", "."))
def test_what_everybody_can_write_to_is_neither_read_nor_written(opened, tuning_folder):
    save(64)
    before = tuning_file().read_bytes()
    (tuning_folder / opened).chmod(0o777)
    tuning._tuned_tiles.cache_clear()
    (message,) = messages_of(lambda: [saved(64), saved(64)])
    assert f"every user can write to {tuning_folder / opened}: run `chmod o-w" in message
    assert "XDG_CONFIG_HOME" in message
    assert saved(64) is None
    with pytest.raises(UntrustedError, match="every user can write"):
        save(64, OTHER)
    assert tuning_file().read_bytes() == before


def test_the_folder_is_made_for_the_user_alone(tuning_folder, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tuning_folder / "a" / "b"))
    save()
    for name in (".", "a", "a/b", "a/b/fa2cupy"):
        folder = tuning_folder / name
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_to_the_file_stays_a_link(tuning_folder, tmp_path):
    (tmp_path / "dotfiles").mkdir(mode=0o700)
    tuning_folder.mkdir(mode=0o700)
    tuning_file().symlink_to(tmp_path / "dotfiles" / "tiles.json")
    save(64)
    assert tuning_file().is_symlink()
    assert saved(64) == TILE
    assert len(json.loads((tmp_path / "dotfiles" / "tiles.json").read_text())) == 1


def test_a_file_in_the_folders_place_is_no_tuning_file(tuning_folder):
    tuning_folder.touch()
    assert messages_of(saved) == []
