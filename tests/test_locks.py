"""Compilation in several threads and processes: forks, processes that start together, and Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fa2cupy import TileConfig
from fa2cupy.gpu import counters, launch
from fa2cupy.jit import cache, compiler
from fa2cupy.jit.cache import cached_kernel, entry_path
from fa2cupy.jit.source import KernelSource, render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.system import locks
from fa2cupy.system.locks import ForkGate, file_lock, new_lock

SPEC = KernelSpec("delta", None, "sm_80", "float16", 64, False, TileConfig(16, 1, 4))
OTHER = dataclasses.replace(SPEC, head_dim=32)
TIMEOUT = 60  # for threads and processes that would otherwise wait for ever

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")


def fork(work: Callable[[], object]) -> int:
    """Runs `work` in a child process, which exits with 0 if `work` returns, and returns the child's id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def succeeds(child: int) -> bool:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@contextlib.contextmanager
def slow_compilation(monkeypatch) -> Iterator[None]:
    """Compiles `SPEC` in a thread of this process while the body runs."""
    compiling, finish = threading.Event(), threading.Event()
    compile_source = cache.compile_source

    def slow(source: KernelSource):
        compiling.set()
        finish.wait(TIMEOUT)
        return compile_source(source)

    with monkeypatch.context() as context:
        context.setattr(cache, "compile_source", slow)
        thread = threading.Thread(target=cached_kernel, args=(SPEC,))
        thread.start()
        compiling.wait(TIMEOUT)
    try:
        yield
    finally:
        finish.set()
        thread.join(TIMEOUT)


# ---------------------------------------------------------------------------------------------------------------- forks


@forks
def test_a_child_that_is_forked_while_a_thread_compiles_gets_the_kernel_all_the_same(fake_compiler, monkeypatch):
    monkeypatch.setattr(cache, "_LONGEST_COMPILATION_S", 0.2)  # the parent holds the lock for other processes
    monkeypatch.setattr(locks, "_LONGEST_FORK_S", TIMEOUT)
    with slow_compilation(monkeypatch):
        assert succeeds(fork(lambda: cached_kernel(SPEC)))


@forks
def test_a_child_has_every_lock_of_the_package_free():
    held = [new_lock(), compiler._loading, launch._lock, counters.Counters(2)._lock]
    with contextlib.ExitStack() as stack:
        for lock in held:
            stack.enter_context(lock)

        def all_are_free() -> None:
            assert not any(lock.locked() for lock in held)
            assert all(lock.acquire(timeout=1) for lock in held)

        assert succeeds(fork(all_are_free))
        assert all(lock.locked() for lock in held)


def test_every_lock_of_the_package_is_one_that_a_child_has_free():
    makers = re.compile(r"threading\.(R?Lock|Condition|Semaphore|Event)\(")
    package = Path(locks.__file__).parent
    assert [path.name for path in package.glob("*.py") if makers.search(path.read_text())] == ["locks.py"]


@forks
def test_the_parents_end_frees_its_lock_file_though_a_child_lives_on(tmp_path):
    # A child inherits the open file, and holds its lock until it closes the file.
    reading, writing = os.pipe()
    path = tmp_path / "lock"

    def lock_and_leave_a_child() -> None:
        with file_lock(path, 1):
            grandchild = os.fork()
            if not grandchild:
                os.close(writing)
                os.read(reading, 1)  # until the test ends
                os._exit(0)
            os._exit(0)  # without unlocking

    assert succeeds(fork(lock_and_leave_a_child))
    start = time.monotonic()
    with file_lock(path, TIMEOUT):
        assert time.monotonic() - start < TIMEOUT / 2
    os.close(writing)
    os.close(reading)


@forks
@pytest.mark.parametrize("remove", (False, True))
def test_a_child_that_leaves_the_body_of_a_lock_leaves_the_parents_lock_and_all_files_alone(tmp_path, remove):
    path = tmp_path / "lock"
    lock = file_lock(path, 1, remove=remove)
    lock.__enter__()
    (descriptor,) = locks._open_lock_files

    def leave() -> None:
        assert not locks._open_lock_files
        # Another file gets the number of the lock file, which the child has closed.
        os.dup2(os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT), descriptor)
        lock.__exit__(None, None, None)
        assert os.write(descriptor, b"text") == 4
        assert path.exists()
        with pytest.raises(TimeoutError), file_lock(path, 0):
            pytest.fail("the parent has the lock")

    child = fork(leave)
    assert succeeds(child)
    lock.__exit__(None, None, None)
    assert path.exists() == (not remove)
    with file_lock(path, 0):
        pass


@forks
def test_a_child_that_is_forked_from_inside_a_gate_can_leave_it_and_fork(monkeypatch):
    monkeypatch.setattr(locks, "_LONGEST_FORK_S", 0.1)  # a fork from inside waits for itself
    gate = ForkGate()
    thread = threading.Thread(target=gate.__enter__)  # stays inside; the child does not have this thread
    thread.start()
    thread.join(TIMEOUT)
    gate.__enter__()

    def leave_and_fork() -> None:
        monkeypatch.setattr(locks, "_LONGEST_FORK_S", TIMEOUT)
        gate.__exit__(None, None, None)
        start = time.monotonic()
        assert succeeds(fork(lambda: None)) and time.monotonic() - start < TIMEOUT / 2

    child = fork(leave_and_fork)
    assert succeeds(child)
    for left in (1, 0):  # forks of other tests wait for this gate, too
        gate.__exit__(None, None, None)
        assert gate.inside == left


@forks
def test_a_fork_waits_until_no_thread_is_in_nvrtc():
    gate = ForkGate()
    entered, leave = threading.Event(), threading.Event()
    seen = []

    def work() -> None:
        with gate:
            entered.set()
            leave.wait(TIMEOUT)
            seen.append("left")

    def go_through() -> None:
        assert seen == ["left"]
        with gate:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(TIMEOUT)
    threading.Timer(0.2, leave.set).start()
    child = fork(go_through)
    assert succeeds(child)
    thread.join(TIMEOUT)
    with gate:  # open again in the parent, too
        pass


@forks
def test_a_child_that_is_forked_in_the_middle_of_nvrtc_can_compile():
    pytest.importorskip("cupy", reason="kernels are compiled by the NVRTC that CuPy loads", exc_type=ImportError)
    source = render_kernel(SPEC)
    compiler.compile_source(source)  # loads NVRTC, so that nothing is loaded below
    thread = threading.Thread(target=compiler.compile_source, args=(source,))
    thread.start()
    while not compiler.compilations() and thread.is_alive():
        pass
    time.sleep(0.01)  # now NVRTC's front end holds a lock, which would stay locked in the child
    children = [fork(lambda: compiler.compile_source(source))]
    thread.join(TIMEOUT)
    assert all(map(succeeds, children))


def test_locks_that_nobody_uses_any_more_are_forgotten(small_heap):
    before = len(locks._thread_locks)
    kept = [new_lock() for _ in range(100)]
    assert len(locks._thread_locks) == before + 100
    del kept
    gc.collect()
    assert len(locks._thread_locks) <= before


# ----------------------------------------------------------------------------------------------- processes side by side


@forks
def test_processes_that_start_together_compile_a_kernel_once(fake_compiler, monkeypatch, tmp_path):
    log = tmp_path / "compilations"
    compile_source = cache.compile_source

    def slow(source: KernelSource):
        with open(log, "a") as file:
            file.write("x")
        time.sleep(0.3)
        return compile_source(source)

    monkeypatch.setattr(cache, "compile_source", slow)
    children = [fork(lambda: cached_kernel(SPEC)) for _ in range(8)]
    assert all(succeeds(child) for child in children)
    assert log.read_text() == "x"
    assert [path.name for path in entry_path(SPEC).parent.iterdir()] == [entry_path(SPEC).name]  # no lock is left


@forks
def test_a_process_that_is_killed_while_it_compiles_keeps_nobody_waiting(fake_compiler, monkeypatch, tmp_path):
    ready = tmp_path / "ready"

    def die(source: KernelSource):
        ready.touch()
        time.sleep(TIMEOUT)

    with monkeypatch.context() as context:
        context.setattr(cache, "compile_source", die)
        child = fork(lambda: cached_kernel(SPEC))
    while not ready.exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    start = time.monotonic()
    assert cached_kernel(SPEC).symbol == SPEC.symbol
    assert time.monotonic() - start < TIMEOUT / 2
    assert fake_compiler == [SPEC]


def test_a_lock_that_is_held_for_long_is_not_waited_for_any_longer(fake_compiler, monkeypatch):
    monkeypatch.setattr(cache, "_LONGEST_COMPILATION_S", 0.1)
    folder = entry_path(SPEC).parent
    folder.mkdir(mode=0o700)
    with file_lock(folder / f".lock-{entry_path(SPEC).stem}", 1):
        assert cached_kernel(SPEC).symbol == SPEC.symbol
    assert fake_compiler == [SPEC]
    assert entry_path(SPEC).exists()


@pytest.mark.parametrize("number", (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
def test_where_files_cannot_be_locked_kernels_are_compiled_all_the_same(number, fake_compiler, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert cached_kernel(SPEC).symbol == SPEC.symbol
    assert entry_path(SPEC).exists()


def test_a_lock_is_held_between_threads_and_ends_with_an_error(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(KeyError), file_lock(path, 1):
        with pytest.raises(TimeoutError), file_lock(path, 0.1):
            pytest.fail("two have the lock")
        raise KeyError
    with file_lock(path, 0):
        pass
    assert not locks._open_lock_files


# --------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.fixture
def press_ctrl_c(fake_compiler, monkeypatch):
    """Presses Ctrl-C in the first compilation, which does not notice it; neither would NVRTC."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    compile_source = cache.compile_source

    def pressed(source: KernelSource):
        kernel = compile_source(source)
        if len(fake_compiler) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return kernel

    monkeypatch.setattr(cache, "compile_source", pressed)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_keeps_the_kernel_that_was_being_compiled(fake_compiler, press_ctrl_c):
    with pytest.raises(KeyboardInterrupt):
        cached_kernel(SPEC)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert fake_compiler == [SPEC]
    assert cached_kernel(SPEC).symbol == SPEC.symbol  # read from memory
    cache._kernels.clear()
    assert cached_kernel(SPEC).symbol == SPEC.symbol  # read from disk
    assert fake_compiler == [SPEC]


def test_ctrl_c_keeps_the_kernel_where_nothing_can_be_stored(fake_compiler, press_ctrl_c, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="cannot be stored"):
        cached_kernel(SPEC)
    cached_kernel(SPEC)
    assert fake_compiler == [SPEC]


def test_ctrl_c_ends_a_compilation_that_fails(fake_compiler, press_ctrl_c, monkeypatch):
    def fail(source: KernelSource):
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("refused")

    monkeypatch.setattr(cache, "compile_source", fail)
    with pytest.raises(KeyboardInterrupt):
        cached_kernel(SPEC)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_stays_in_charge(fake_compiler, press_ctrl_c):
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(entry_path(SPEC).exists()))
    with contextlib.suppress(KeyboardInterrupt):
        cached_kernel(SPEC)
    assert pressed == [False]  # called before the kernel is stored
    assert entry_path(SPEC).exists()


def test_other_threads_leave_signals_alone(fake_compiler):
    kernels = []
    thread = threading.Thread(target=lambda: kernels.append(cached_kernel(SPEC)))
    thread.start()
    thread.join(TIMEOUT)
    assert kernels == [cached_kernel(SPEC)]
    assert cached_kernel(OTHER).symbol == OTHER.symbol
