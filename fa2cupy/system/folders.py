"""Folders and files that nobody else can change: machine code from the disk runs with the user's rights.

A folder of one's own belongs to the user or to root. Only they can write to it and to the folders above it, up to the
home folder, or up to the root for folders outside of it. A group that has the user's name and no other member is the
user. A folder that others fill on purpose may belong to anybody and be writable by its group, but not by everybody.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import warnings
from collections.abc import Hashable
from pathlib import Path

try:
    import grp
    import pwd
except ImportError:  # Windows keeps the folders of a user from others by access control lists
    grp = pwd = None

__all__ = ["UNFINISHED", "UntrustedError", "read_file", "replace_file", "trusted_folder", "warn_once", "why_untrusted"]

UNFINISHED = ".new-"  # what stays of a process that was stopped while it wrote
_OPTIONS = getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe in a file's place must not block
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class UntrustedError(PermissionError):
    """Somebody else can change a folder or a file: `reason` says who, `remedy` what to do about it, if anything."""

    def __init__(self, reason: str, remedy: str = ""):
        super().__init__(f"{reason}: {remedy}" if remedy else reason)
        self.reason, self.remedy = reason, remedy

    def advice(self, alternative: str) -> str:
        """The reason and everything that helps."""
        return f"{self.reason}: {f'{self.remedy}, or ' if self.remedy else ''}{alternative}"


def trusted_folder(path: Path, *, create: bool = False, shared: bool = False) -> Path | None:
    """The folder, without symbolic links in its path, once it is known that nobody else can change what is in it.

    Parameters
    ----------
    path : pathlib.Path
    create : bool, optional
        Makes the folders that are missing, for the user alone.
    shared : bool, optional
        By the rule for folders that others fill.

    Returns
    -------
    pathlib.Path or None
        None if there is no such folder.

    Raises
    ------
    UntrustedError
        Somebody else can change it.
    OSError
        It cannot be looked at, or not be made.
    """
    resolved = Path(os.path.realpath(path))
    # From the top down: nobody else can exchange what lies in a folder that has passed.
    for folder in _chain(resolved):
        try:
            status = os.lstat(folder)
        except FileNotFoundError:
            if not create:
                return None
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        error = why_untrusted(status, folder, above=folder != resolved, shared=shared)
        if error:
            raise error
    return resolved


def _chain(resolved: Path) -> list[Path]:
    chain = [*reversed(resolved.parents), resolved]
    with contextlib.suppress(RuntimeError):  # no home folder
        home = Path(os.path.realpath(Path.home()))
        if home in chain:
            return chain[chain.index(home) :]
    return chain


def read_file(path: Path, *, shared: bool = False) -> bytes:
    """The content of a file in a trusted folder. The file that is checked is the one that is read.

    Raises
    ------
    UntrustedError
        Somebody else can change the file.
    OSError
        It cannot be read, or is a symbolic link.
    """
    descriptor = os.open(path, os.O_RDONLY | _OPTIONS | _NO_LINKS)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        error = why_untrusted(status, path, shared=shared)
        if error:
            raise error
        return file.read()


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file under another name and renames it, so that nobody reads half of it."""
    temporary = path.with_name(f"{UNFINISHED}{os.urandom(8).hex()}")
    # The umask decides whether others can read it. A folder of the user's own does not let them so far.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPTIONS | _NO_LINKS, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def why_untrusted(
    status: os.stat_result, path: Path, *, above: bool = False, shared: bool = False
) -> UntrustedError | None:
    """Who else can change a file or folder, or None if nobody can.

    Parameters
    ----------
    status : os.stat_result
    path : pathlib.Path
        For the text.
    above : bool, optional
        A folder that contains the one in question: the sticky bit protects what is in it.
    shared : bool, optional
        By the rule for folders that others fill.
    """
    if not hasattr(os, "geteuid"):
        return None
    user, owner, sticky = os.geteuid(), status.st_uid, status.st_mode & stat.S_ISVTX
    writable = 0 if above and sticky else status.st_mode
    if not (shared or owner in (0, user) or (above and owner == _unmapped_user())):
        return UntrustedError(f"{path} belongs to user {_name(owner)}, and this process to user {_name(user)}")
    if writable & stat.S_IWOTH:
        who, change = "every user", "o-w"
    elif writable & stat.S_IWGRP and not shared and not _is_private(status.st_gid, (owner, user)):
        who, change = "other users of its group", "g-w"
    else:
        return None
    # A sticky folder is open on purpose, and only the owner can change a mode.
    remedy = f"run `chmod {change} {path}`" if owner == user and not sticky else ""
    return UntrustedError(f"{who} can write to {path}", remedy)


def _is_private(group: int, users: tuple[int, ...]) -> bool:
    try:
        entry = grp.getgrgid(group)
        names = {pwd.getpwuid(user).pw_name for user in users}
    except KeyError:
        return False
    return entry.gr_name in names and names.issuperset(entry.gr_mem)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


@functools.lru_cache(maxsize=None)
def _unmapped_user() -> int | None:
    """In a container without privileges: whom files seem to belong to that are the host's root's, or other users'."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


_warned_about: set[Hashable] = set()


def warn_once(about: Hashable, text: str) -> None:
    """A warning, the first time in a process that there is something to say about that."""
    if about not in _warned_about:
        _warned_about.add(about)
        warnings.warn(text, stacklevel=3)
