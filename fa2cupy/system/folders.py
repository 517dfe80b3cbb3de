"""Checks that other users cannot change a folder or file: machine code from the disk runs with the user's rights.

A private folder belongs to the user or to root. Only these two can write to it and to the folders above it, up to the
home folder, or up to the root for folders outside the home folder. A group that has the user's name and no other member
counts as the user. A shared folder, which others fill on purpose, may belong to any user and be writable by its group,
but not by every user.
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
from typing import Literal, overload

try:
    import grp
    import pwd
except ImportError:  # on Windows, access control lists protect a user's folders
    grp = pwd = None  # type: ignore[assignment]  # not read without os.geteuid

__all__ = ["UNFINISHED", "UntrustedError", "read_file", "replace_file", "trusted_folder", "warn_once", "why_untrusted"]

UNFINISHED = ".new-"  # prefix of files that are left by a process that was stopped while it wrote
_OPTIONS = getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # opening a pipe in place of a file must not block
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class UntrustedError(PermissionError):
    """Another user can change a folder or a file. `reason` says who; `remedy` is a command against it, or empty."""

    def __init__(self, reason: str, remedy: str = ""):
        super().__init__(f"{reason}: {remedy}" if remedy else reason)
        self.reason, self.remedy = reason, remedy

    def advice(self, alternative: str) -> str:
        """The reason, the remedy if there is one, and the alternative."""
        return f"{self.reason}: {f'{self.remedy}, or ' if self.remedy else ''}{alternative}"


@overload
def trusted_folder(path: Path, *, create: Literal[True], shared: bool = False) -> Path: ...
@overload
def trusted_folder(path: Path, *, create: bool = False, shared: bool = False) -> Path | None: ...
def trusted_folder(path: Path, *, create: bool = False, shared: bool = False) -> Path | None:
    """The folder with symbolic links resolved, after a check that no other user can change its content.

    Parameters
    ----------
    path : pathlib.Path
    create : bool, optional
        Creates missing folders, which only the user can access.
    shared : bool, optional
        Applies the rule for shared folders.

    Returns
    -------
    pathlib.Path or None
        None if the folder does not exist.

    Raises
    ------
    UntrustedError
        Another user can change it.
    OSError
        It cannot be examined or created.
    """
    resolved = Path(os.path.realpath(path))
    # From the top down, because no other user can replace what is in a folder that has been checked.
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
    with contextlib.suppress(RuntimeError):  # the user has no home folder
        home = Path(os.path.realpath(Path.home()))
        if home in chain:
            return chain[chain.index(home) :]
    return chain


def read_file(path: Path, *, shared: bool = False) -> bytes:
    """The content of a file in a trusted folder. The check and the reading use the same open file.

    Raises
    ------
    UntrustedError
        Another user can change the file.
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
    """Writes a file under a temporary name and renames it, so that no process reads an incomplete file."""
    temporary = path.with_name(f"{UNFINISHED}{os.urandom(8).hex()}")
    # The umask decides if others can read it in a shared folder. They have no access to the user's own folders.
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
    """The reason why another user can change a file or folder, or None if none can.

    Parameters
    ----------
    status : os.stat_result
    path : pathlib.Path
        Named in the message.
    above : bool, optional
        True for a folder above the one in question: its sticky bit, if set, protects its content.
    shared : bool, optional
        Applies the rule for shared folders.
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
    # A sticky folder is writable for others on purpose, and only the owner can change a mode.
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
    """The user that files of unmapped users, such as the host's root, seem to belong to; None if all users are mapped.

    A user namespace, as of a container without privileges, maps only some of the host's users.
    """
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


_warned_about: set[Hashable] = set()


def warn_once(about: Hashable, text: str) -> None:
    """Warns, unless this process has already warned about the same thing."""
    if about not in _warned_about:
        _warned_about.add(about)
        warnings.warn(text, stacklevel=3)
