"""Trust in folders of machine code: those that others could change are refused, and shared folders are looked into.

The tests run as root and as a user. Only root can give a file away, so for a user `geteuid` returns another number.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.recorded_warnings import warnings_of

import fa2cupy
from fa2cupy import TileConfig
from fa2cupy.jit import cache
from fa2cupy.jit.cache import cached_kernel, entry_path
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.system import folders
from fa2cupy.system.folders import UNFINISHED, UntrustedError, read_file, replace_file, trusted_folder, why_untrusted

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files belong to nobody here")

SPEC = KernelSpec("delta", None, "sm_80", "float16", 64, False, TileConfig(16, 1, 4))
OTHER = dataclasses.replace(SPEC, head_dim=32)
ME, OTHER_USER = 1000, 1001
FOLDER = Path("/some/folder")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ------------------------------------------------------------------------------------------------------------ the rules


@pytest.fixture
def users(monkeypatch):
    """Sets up users 1000 (me) and 1001 (other), each with a group of that name, and a group of both."""
    accounts = {0: "root", ME: "me", OTHER_USER: "other"}
    groups = {0: ("root", []), ME: ("me", []), OTHER_USER: ("other", []), 2000: ("lab", ["me", "other"])}
    groups[3000] = ("me", ["other"])
    monkeypatch.setattr(folders.os, "geteuid", lambda: ME)
    monkeypatch.setattr(folders.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=accounts[uid]))
    monkeypatch.setattr(
        folders.grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=groups[gid][0], gr_mem=groups[gid][1])
    )
    monkeypatch.setattr(folders, "_unmapped_user", lambda: None)


def status(owner: int, mode: int, group: int = 2000) -> os.stat_result:
    return os.stat_result((stat.S_IFDIR | mode, 1, 1, 2, owner, group, 0, 0, 0, 0))


FINE, REFUSED = None, UntrustedError


@pytest.mark.parametrize(
    ("owner", "mode", "group", "itself", "above", "shared"),
    [
        (ME, 0o700, 2000, FINE, FINE, FINE),
        (ME, 0o755, 2000, FINE, FINE, FINE),
        (0, 0o755, 0, FINE, FINE, FINE),  # a folder of an image
        (OTHER_USER, 0o700, 2000, REFUSED, REFUSED, FINE),
        (OTHER_USER, 0o755, 2000, REFUSED, REFUSED, FINE),
        (ME, 0o775, 2000, REFUSED, REFUSED, FINE),  # a folder of a lab
        (ME, 0o775, ME, FINE, FINE, FINE),  # a group of one, as with umask 002
        (ME, 0o775, 3000, REFUSED, REFUSED, FINE),  # a group that has another member
        (ME, 0o775, OTHER_USER, REFUSED, REFUSED, FINE),
        (ME, 0o775, 4000, REFUSED, REFUSED, FINE),  # a group without a name
        (0, 0o775, 0, FINE, FINE, FINE),
        (ME, 0o777, 2000, REFUSED, REFUSED, REFUSED),
        (0, 0o1777, 0, REFUSED, FINE, REFUSED),  # /tmp
        (0, 0o1775, 2000, REFUSED, FINE, FINE),
        (OTHER_USER, 0o1777, 2000, REFUSED, REFUSED, REFUSED),  # its owner can rename what is in it
        (ME, 0o702, 2000, REFUSED, REFUSED, REFUSED),
    ],
)
def test_who_may_write(owner, mode, group, itself, above, shared, users):
    def kind(*args, **kwargs):
        error = why_untrusted(status(owner, mode, group), FOLDER, **kwargs)
        return error and type(error)

    assert kind() is itself
    assert kind(above=True) is above
    assert kind(shared=True) is shared


def test_shared_folders_may_lie_below_the_temporary_folder_of_anybody(users):
    assert why_untrusted(status(OTHER_USER, 0o1777), FOLDER, above=True, shared=True) is None
    assert why_untrusted(status(OTHER_USER, 0o777), FOLDER, above=True, shared=True)


def test_root_does_not_use_a_users_folder(users, monkeypatch):
    monkeypatch.setattr(folders.os, "geteuid", lambda: 0)
    assert "belongs to user me, and this process to user root" in str(why_untrusted(status(ME, 0o700), FOLDER))
    assert why_untrusted(status(0, 0o700), FOLDER) is None


def test_users_without_a_name_are_named_by_number(users):
    assert "belongs to user 4711, and this process to user me" in str(why_untrusted(status(4711, 0o700), FOLDER))


def test_in_a_container_without_privileges_the_hosts_root_owns_what_lies_above(users, monkeypatch):
    monkeypatch.setattr(folders, "_unmapped_user", lambda: 65534)
    assert why_untrusted(status(65534, 0o755), FOLDER, above=True) is None
    assert why_untrusted(status(65534, 0o777), FOLDER, above=True)
    monkeypatch.setattr(folders.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="nobody"))
    assert why_untrusted(status(65534, 0o755), FOLDER)


@pytest.mark.parametrize(
    ("owner", "mode", "advice"),
    [
        (ME, 0o777, "every user can write to /some/folder: run `chmod o-w /some/folder`, or DO THAT"),
        (ME, 0o770, "other users of its group can write to /some/folder: run `chmod g-w /some/folder`, or DO THAT"),
        (ME, 0o1777, "every user can write to /some/folder: DO THAT"),
        (0, 0o777, "every user can write to /some/folder: DO THAT"),
        (OTHER_USER, 0o777, "/some/folder belongs to user other, and this process to user me: DO THAT"),
    ],
)
def test_advice_says_who_and_what_this_user_can_do(owner, mode, advice, users):
    assert why_untrusted(status(owner, mode), FOLDER).advice("DO THAT") == advice


# ------------------------------------------------------------------------------------------------------- on a real disk


def test_folders_are_made_for_the_user_alone_every_one_of_them(fake_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path / "a" / "b" / "c"))
    before = os.umask(0)
    try:
        cached_kernel(SPEC)
    finally:
        os.umask(before)
    assert [mode_of(tmp_path / name) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3


@pytest.mark.parametrize(("umask", "mode"), ((0o000, 0o644), (0o022, 0o644), (0o077, 0o600)))
def test_entries_are_as_readable_as_the_umask_says(umask, mode, fake_compiler):
    before = os.umask(umask)
    try:
        cached_kernel(SPEC)
    finally:
        os.umask(before)
    assert mode_of(entry_path(SPEC)) == mode


@pytest.mark.parametrize("place", ("the folder", "a folder above"))
@pytest.mark.parametrize("mode", (0o777, 0o1777, 0o702))
def test_a_folder_that_everybody_can_write_to_is_refused_with_one_sentence(
    place, mode, fake_compiler, isolated_cache, monkeypatch
):
    folder = isolated_cache / "own"
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(folder))
    cached_kernel(SPEC)  # a good entry that anybody could have written
    opened = folder if place == "the folder" else isolated_cache
    opened.chmod(mode)
    cache._kernels.clear()
    messages = warnings_of(lambda: [cached_kernel(SPEC), cached_kernel(OTHER), fa2cupy.clear_cache()])
    if opened != folder and mode & stat.S_ISVTX:  # as in /tmp
        assert fake_compiler == [SPEC, OTHER]
        assert not messages
        return
    assert fake_compiler == [SPEC, SPEC, OTHER]
    (message,) = messages
    remedy = "" if mode & stat.S_ISVTX else f"run `chmod o-w {opened}`, or "
    assert f"every user can write to {opened}: {remedy}set FA2CUPY_CACHE_DIR" in message
    assert "FA2CUPY_CACHE_PATH" in message
    assert not entry_path(OTHER).exists()
    assert entry_path(SPEC).exists()
    assert "every user" in fa2cupy.info()["cache_refused"]
    opened.chmod(0o700)
    assert fa2cupy.info()["cache_refused"] is None


def test_a_folder_of_another_user_is_refused(fake_compiler, isolated_cache, monkeypatch):
    cached_kernel(SPEC)
    if os.geteuid() == 0:
        os.chown(isolated_cache, 4711, -1)
    else:
        mine = os.geteuid()
        monkeypatch.setattr(folders.os, "geteuid", lambda: mine + 1)
    cache._kernels.clear()
    (message,) = warnings_of(lambda: cached_kernel(SPEC))
    assert "belongs to user" in message
    assert "set FA2CUPY_CACHE_DIR" in message
    assert fake_compiler == [SPEC, SPEC]


def test_a_link_leads_to_where_the_rules_hold_and_cannot_be_exchanged_later(fake_compiler, tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "open" / "link"
    link.symlink_to(tmp_path / "mine")
    assert trusted_folder(link) == tmp_path / "mine"
    (tmp_path / "open" / "cache").mkdir(mode=0o700)
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "open" / "cache")
    with pytest.raises(UntrustedError, match="every user"):
        trusted_folder(tmp_path / "mine" / "link")


def test_what_lies_above_the_home_folder_is_not_the_users_business(tmp_path, monkeypatch):
    home = tmp_path / "open" / "home"
    home.mkdir(parents=True, mode=0o700)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UntrustedError):
        trusted_folder(home / "cache", create=True)
    monkeypatch.setenv("HOME", str(home))
    assert trusted_folder(home / "cache", create=True) == home / "cache"
    home.chmod(0o777)
    with pytest.raises(UntrustedError, match=re.escape(str(home))):
        trusted_folder(home / "cache")


def test_a_folder_without_a_home_that_somebody_else_has_made_is_refused(fake_compiler, monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for variable in ("FA2CUPY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert not warnings_of(lambda: cached_kernel(SPEC))
    assert entry_path(SPEC).exists()
    (tmp_path / "tmp" / f"fa2cupy-{os.getuid()}").chmod(0o777)
    cache._kernels.clear()
    assert len(warnings_of(lambda: cached_kernel(SPEC))) == 1
    assert fake_compiler == [SPEC, SPEC]


@pytest.mark.parametrize("kind", ("link", "pipe", "folder", "open to all"))
def test_only_plain_files_of_the_user_are_read(kind, fake_compiler, caplog, tmp_path):
    cached_kernel(SPEC)
    path = entry_path(SPEC)
    if kind == "open to all":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        if kind == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
    cache._kernels.clear()
    with caplog.at_level(logging.WARNING, logger="fa2cupy"):
        messages = warnings_of(lambda: cached_kernel(SPEC))
    assert fake_compiler == [SPEC, SPEC]
    (record,) = caplog.records
    assert kind != "pipe" or "not a regular file" in record.getMessage()
    assert len(messages) == (kind == "folder")  # a file cannot replace a folder
    if kind != "folder":
        assert mode_of(path) == 0o644
        cache._kernels.clear()
        cached_kernel(SPEC)
        assert fake_compiler == [SPEC, SPEC]


def test_the_file_that_is_checked_is_the_one_that_is_read(tmp_path, monkeypatch):
    path, theirs = tmp_path / "file", tmp_path / "theirs"
    replace_file(path, b"mine")
    theirs.write_bytes(b"theirs")
    theirs.chmod(0o666)
    real = os.open

    def open_and_exchange(*arguments):
        descriptor = real(*arguments)
        os.replace(theirs, path)
        return descriptor

    monkeypatch.setattr(folders.os, "open", open_and_exchange)
    assert read_file(path) == b"mine"


# ------------------------------------------------------------------------------------------------------- shared folders


@pytest.fixture
def shared_folder(fake_compiler, isolated_cache, tmp_path, monkeypatch):
    """Provides a folder that an administrator has filled with `SPEC` by precompiling, for users to look into."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    with monkeypatch.context() as context:
        context.setenv("FA2CUPY_CACHE_DIR", str(folder))
        cached_kernel(SPEC)
    cache._kernels.clear()
    fake_compiler.clear()
    monkeypatch.setenv("FA2CUPY_CACHE_PATH", os.pathsep.join(["", str(tmp_path / "missing"), str(folder)]))
    return folder


def test_kernels_of_a_shared_folder_are_used_where_they_are(shared_folder, fake_compiler, isolated_cache):
    (entry,) = shared_folder.iterdir()
    entry.chmod(0o444)
    before = entry.stat().st_mtime_ns
    shared_folder.chmod(0o555)
    assert not warnings_of(lambda: cached_kernel(SPEC))
    assert fake_compiler == []
    assert not isolated_cache.exists()
    assert entry.stat().st_mtime_ns == before
    cached_kernel(OTHER)
    assert fake_compiler == [OTHER]
    assert [path.name for path in isolated_cache.iterdir()] == [entry_path(OTHER).name]
    assert list(shared_folder.iterdir()) == [entry]
    assert fa2cupy.info()["cache_path"][str(shared_folder)] == "1 kernels"
    assert fa2cupy.clear_cache() == 1
    assert list(shared_folder.iterdir()) == [entry]


def test_the_own_folder_comes_before_shared_ones(shared_folder, fake_compiler, isolated_cache, caplog):
    (entry,) = shared_folder.iterdir()
    isolated_cache.mkdir(mode=0o700)
    cached_kernel(SPEC)
    (isolated_cache / entry.name).write_bytes(entry.read_bytes())
    entry.write_bytes(b"damaged")
    cache._kernels.clear()
    cached_kernel(SPEC)
    assert fake_compiler == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_shared_folder_may_belong_to_anybody_and_its_group_may_fill_it(shared_folder, fake_compiler, monkeypatch):
    shared_folder.chmod(0o2775)
    (entry,) = shared_folder.iterdir()
    entry.chmod(0o664)
    if os.geteuid() == 0:
        os.chown(shared_folder, 4711, 4711)
        os.chown(entry, 4712, 4711)
    else:
        monkeypatch.setenv("FA2CUPY_CACHE_DIR", "/proc/nobody")
        mine = os.geteuid()
        monkeypatch.setattr(folders.os, "geteuid", lambda: mine + 1)
    cached_kernel(SPEC)
    assert fake_compiler == []


@pytest.mark.parametrize("opened", ("folder", "above", "file"))
def test_a_shared_folder_that_everybody_can_write_to_is_refused(opened, shared_folder, fake_compiler, caplog):
    (entry,) = shared_folder.iterdir()
    path = {"folder": shared_folder, "above": shared_folder.parent, "file": entry}[opened]
    path.chmod(0o777)
    messages = warnings_of(lambda: cached_kernel(SPEC))
    assert fake_compiler == [SPEC]
    if opened == "file":
        assert f"every user can write to {entry}" in caplog.text
    else:
        named = [message for message in messages if "FA2CUPY_CACHE_PATH: " in message]
        assert named
        assert all(f"every user can write to {path}: run `chmod o-w {path}`, or name another" in each for each in named)
    path.chmod(0o700)


def test_a_damaged_kernel_in_a_shared_folder_is_compiled_into_the_own_folder(shared_folder, fake_compiler, caplog):
    (entry,) = shared_folder.iterdir()
    entry.write_bytes(b"damaged")
    cached_kernel(SPEC)
    cache._kernels.clear()
    cached_kernel(SPEC)
    assert fake_compiler == [SPEC]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert entry.read_bytes() == b"damaged"


@pytest.mark.parametrize("function", ("lstat", "open"))
def test_a_shared_folder_that_cannot_be_read_is_passed_over(
    function, shared_folder, fake_compiler, caplog, monkeypatch
):
    real = getattr(os, function)

    def as_a_user(path, *arguments):  # root would read it
        if shared_folder in (Path(path), Path(path).parent):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *arguments)

    monkeypatch.setattr(folders.os, function, as_a_user)
    assert not warnings_of(lambda: cached_kernel(SPEC))
    assert fake_compiler == [SPEC]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_file_in_a_folders_place_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.touch(mode=0o600)
    for path in (file, file / "below"):
        with pytest.raises(NotADirectoryError):
            trusted_folder(path)


def test_what_has_the_temporary_name_already_is_not_overwritten(tmp_path, monkeypatch):
    """Somebody may have put a link there: the file is created, or not written."""
    monkeypatch.setattr(os, "urandom", lambda number: bytes(number))
    kept = tmp_path / f"{UNFINISHED}{bytes(8).hex()}"
    kept.write_text("another process is writing this")
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "new", b"data")
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    assert kept.read_text() == "another process is writing this"


def test_what_lies_above_a_shared_folder_may_be_shared_too(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_is_private", lambda group, users: False)
    folder = tmp_path / "above" / "shared"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o775)
    assert trusted_folder(folder, shared=True) == Path(os.path.realpath(folder))
    with pytest.raises(UntrustedError, match="other users of its group can write to .*above$|chmod g-w"):
        trusted_folder(folder)


def test_a_file_that_a_group_can_write_to_is_for_shared_folders_only(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_is_private", lambda group, users: False)
    path = tmp_path / "file"
    path.write_bytes(b"data")
    path.chmod(0o664)
    assert read_file(path, shared=True) == b"data"
    with pytest.raises(UntrustedError, match="other users of its group can write to"):
        read_file(path)
