"""Ranks as processes: NumPy arrays by MPI, and what launchers tell them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from support import CHECKOUT

from fa2cupy.distributed import Communicator
from fa2cupy.distributed.transport.launch import launch_of

# Processes write files, because MPI mixes up the lines that they print and may lose the last ones.
SAME_AS_ONE_CALL = """
import pathlib

import numpy as np
from mpi4py import MPI
import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.testing import make_inputs

assert dist.Communicator.from_mpi(MPI.COMM_WORLD, timeout=60).ranks_per_host == 4
comm = dist.Communicator.from_mpi(MPI.COMM_WORLD, ranks_per_host=2, timeout=60)
inputs = make_inputs("bfloat16", seqlen_q=64, num_heads=8, num_heads_kv=4, head_dim=8)
for dtype, tolerance in (("float64", 1e-12), ("bfloat16", 5e-2)):
    q, k, v, do = (x.astype(x.dtype if dtype == "bfloat16" else dtype) for x in inputs)
    options = {"causal": True, "sink": np.linspace(-1, 1, 8).astype("float64" if dtype == "float64" else "float32")}
    o, lse = fa2cupy.forward(q, k, v, **options)
    expected = (o, *fa2cupy.backward(q, k, v, o, lse, do, **options))
    own = [dist.shard(comm, x) for x in (q, k, v, do)]
    for scheme in ("heads", "gather", "hybrid"):
        o_r, backprop = dist.attention(comm, *own[:3], scheme=scheme, **options)
        for found, whole in zip((o_r, *backprop(own[3])), expected, strict=True):
            found = dist.unshard(comm, found).astype("float64")
            np.testing.assert_allclose(found, whole.astype("float64"), rtol=tolerance, atol=tolerance)
try:
    dist.forward(comm, *own[:3], causal=comm.rank == 1)
except ValueError as error:
    assert "causal: expected the same on all ranks, got False on ranks 0, 2, 3; True on rank 1" in str(error)
else:
    raise AssertionError("the ranks made different calls")
pathlib.Path(f"right.{comm.rank}.of.{comm.size}").touch()
"""

LATE = """
import pathlib
import time

from mpi4py import MPI
import fa2cupy.distributed as dist
from fa2cupy.testing import make_inputs

comm = dist.Communicator.from_mpi(MPI.COMM_WORLD, timeout=0.3)
if comm.rank == 1:
    time.sleep(3)
else:
    own = [dist.shard(comm, x) for x in make_inputs("float32", seqlen_q=8, num_heads=2, head_dim=4)[:3]]
    try:
        dist.forward(comm, *own)
    except dist.CommunicationError as error:
        pathlib.Path("message").write_text(str(error))
        MPI.COMM_WORLD.Abort(3)
"""

GO_ON = """
import pathlib
import time

import numpy as np
from mpi4py import MPI
import fa2cupy.distributed as dist

comm = dist.Communicator.from_mpi(MPI.COMM_WORLD, timeout=1.0)
n, errors, later = 100_000, [], []
for step in range(4):
    if step == 1 and comm.rank == 1:
        time.sleep(1.8)
    x = np.full(n, 10.0 ** step)
    try:
        assert (dist.total(comm, x) == 2 * 10.0 ** step).all(), "the sum of two steps"
        assert not errors
    except dist.CommunicationError as error:
        errors.append(str(error))
    x[:] = 1e6  # the caller uses its memory again
    later += [np.full(size, 7.0) for size in (n, n // 2) for _ in range(10)]
end = time.monotonic() + 30
while comm.rank == 0 and not pathlib.Path("right.1").exists() and time.monotonic() < end:
    time.sleep(0.05)
assert len(errors) == 3 and all(error.startswith("an earlier call") for error in errors[1:]), errors
assert all((x == 7).all() for x in later)
pathlib.Path(f"right.{comm.rank}").touch()
"""

HANGS = """
import time

import numpy as np
from mpi4py import MPI
import fa2cupy.distributed as dist

comm = dist.Communicator.from_mpi(MPI.COMM_WORLD, timeout=1)
dist.total(comm, np.ones(3))
if comm.rank == 1:
    time.sleep(100)
dist.total(comm, np.ones(100_000))
"""

RAISES = """
import pathlib

import numpy as np
from mpi4py import MPI
import fa2cupy.distributed as dist

comm = dist.Communicator.from_mpi(MPI.COMM_WORLD, timeout=100)
dist.total(comm, np.ones(3))
if comm.rank == 1:
    raise KeyError("a fault of rank 1")
try:
    dist.total(comm, np.ones(3))
except dist.CommunicationError as error:
    pathlib.Path(f"message.{comm.rank}").write_text(str(error))
"""


@pytest.fixture
def mpiexec(tmp_path):
    """Provides a function that runs a script in several processes and returns the finished process."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpi4py: pip install '.[mpi]'")
    beside = Path(sys.executable).with_name("mpiexec")
    command = str(beside) if beside.exists() else shutil.which("mpiexec")
    if command is None:
        pytest.skip("no mpiexec: pip install '.[mpi]'")

    def run(count: int, script: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OPENBLAS_NUM_THREADS": "1"}
        path = tmp_path / "work.py"
        path.write_text(script)
        return subprocess.run(
            [command, "-n", str(count), sys.executable, str(path)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_four_processes_compute_what_one_does(mpiexec, tmp_path):
    run = mpiexec(4, SAME_AS_ONE_CALL)
    assert run.returncode == 0, run.stderr
    assert {path.name for path in tmp_path.glob("right.*")} == {f"right.{rank}.of.4" for rank in range(4)}


def test_a_late_process_ends_the_others_with_a_message(mpiexec, tmp_path):
    run = mpiexec(2, LATE)
    assert run.returncode != 0
    message = (tmp_path / "message").read_text()
    assert "rank 0 has waited 0.3 s for messages of ranks [1], one of which has ended, is late" in message


@pytest.mark.matrix
def test_processes_that_go_on_after_a_failure_get_errors(mpiexec, tmp_path):
    """The processes end in order, too."""
    run = mpiexec(2, GO_ON)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "right.0").exists() and (tmp_path / "right.1").exists()


def test_a_process_that_hangs_does_not_keep_the_job(mpiexec):
    start = time.monotonic()
    run = mpiexec(2, HANGS)
    assert run.returncode != 0 and time.monotonic() - start < 60
    assert "rank 0 has waited 1 s for ranks [1] to end: it ends the job" in run.stderr


@pytest.mark.matrix
def test_the_others_hear_of_a_process_that_ends(mpiexec, tmp_path):
    start = time.monotonic()
    run = mpiexec(3, RAISES)
    assert run.returncode != 0 and time.monotonic() - start < 60
    messages = [(tmp_path / f"message.{rank}").read_text() for rank in (0, 2)]
    assert any("waits for messages of ranks [1], which have ended" in message for message in messages), messages


def test_without_mpi4py_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="needs mpi4py: pip install mpi4py mpich"):
        Communicator.from_mpi(types.SimpleNamespace(Dup=None))


class TestEnvironment:
    @pytest.mark.parametrize(
        "names",
        [
            ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
            ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
            ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
        ],
    )
    def test_launchers(self, names):
        comm = Communicator.from_env(dict(zip(names, ("2", "6"), strict=False)))
        assert (comm.rank, comm.size, comm.ranks_per_host) == (2, 6, 6)
        comm = Communicator.from_env(dict(zip(names, ("2", "6", "3"), strict=True)))
        assert (comm.rank, comm.size, comm.ranks_per_host) == (2, 6, 3)
        comm = Communicator.from_env(dict(zip(names, ("2", "6", "3"), strict=True)), ranks_per_host=2)
        assert comm.ranks_per_host == 2
        assert Communicator.from_env(dict(zip(names, ("2", "6", "4"), strict=True))).ranks_per_host == 6

    @pytest.mark.parametrize(
        ("environment", "match"),
        [
            ({}, "environment: expected the variables of a launcher \\(RANK and WORLD_SIZE; "),
            ({"RANK": "0"}, "environment: expected the variables"),
            ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK: expected an int, got 'two'"),
            ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK: expected 0 to 3, below WORLD_SIZE, got 4"),
            ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK: expected 0 to 3, below WORLD_SIZE, got -1"),
            ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: expected a positive number of ranks, got 0"),
            ({"RANK": "0", "WORLD_SIZE": "4294967298"}, "WORLD_SIZE: expected a positive number of ranks, got 42949"),
            ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": ""}, "MASTER_PORT: expected an int, got ''"),
            ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "70000"}, "MASTER_PORT: expected a port from 1 to 65535"),
            (
                {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "0"},
                "MASTER_PORT: expected a port from 1 to 65535, got 0",
            ),
            ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "-1"}, "MASTER_PORT: expected a port from 1 to 65535"),
            ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": ""}, "MASTER_ADDR: expected a name or an address of rank"),
        ],
    )
    def test_what_is_wrong_is_named(self, environment, match):
        with pytest.raises(ValueError, match=match):
            Communicator.from_env(environment)

    @pytest.mark.parametrize(
        ("environment", "expected"),
        [
            ({}, "fa2cupy"),
            ({"TORCHELASTIC_RUN_ID": "none"}, "fa2cupy"),
            ({"TORCHELASTIC_RUN_ID": "run 7", "SLURM_JOB_ID": "12"}, "run 7"),
            ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, "12"),
            ({"TORCHELASTIC_RUN_ID": "run 7", "FA2CUPY_JOB_TOKEN": "secret"}, "secret"),
            ({"TORCHELASTIC_RUN_ID": "run 7", "FA2CUPY_JOB_TOKEN": ""}, "run 7"),
        ],
    )
    def test_a_job_has_a_token(self, environment, expected):
        assert launch_of({"RANK": "0", "WORLD_SIZE": "2", **environment}).token == expected

    @pytest.mark.parametrize(
        ("rank", "size", "environment", "expected"),
        [
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE": "prterun-a-5@1"}, "prterun-a-5@1"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"OMPI_MCA_ess_base_jobid": "77"}, "77"),
            ("PMI_RANK", "PMI_SIZE", {"PMI_JOBID": "12.3"}, "12.3"),
            ("PMI_RANK", "PMI_SIZE", {}, "fa2cupy"),
            ("SLURM_PROCID", "SLURM_NTASKS", {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, "12/3"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, "fa2cupy"),
        ],
    )
    def test_launchers_name_their_jobs(self, rank, size, environment, expected):
        assert launch_of({rank: "0", size: "2", **environment}).token == expected

    def test_numpy_arrays_are_refused(self):
        import numpy as np

        comm = Communicator.from_env({"RANK": "0", "WORLD_SIZE": "2"})
        with pytest.raises(TypeError, match=r"NumPy arrays travel by MPI.*Communicator.from_mpi"):
            comm.transport_of(np.zeros(3))
