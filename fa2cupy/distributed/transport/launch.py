"""What a launcher tells each process that it starts: its rank, where rank 0 is, and which job it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["JOB_TOKEN", "Launch", "launch_of"]

#: The variable with the job's token.
JOB_TOKEN = "FA2CUPY_JOB_TOKEN"
_NO_TOKEN = "fa2cupy"


class _Launcher(NamedTuple):
    """Names of variables: the last two may be missing."""

    rank: str
    size: str
    ranks_per_host: str
    #: Each has one text on all ranks of a job, and most often another one in other jobs.
    jobs: tuple[tuple[str, ...], ...]


# A step of Slurm tells jobs apart only if srun has started the ranks themselves. A job may have several steps with one
# torchrun each, and mpirun starts some ranks in a step and others outside of any.
_LAUNCHERS = (
    _Launcher("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", (("TORCHELASTIC_RUN_ID",), ("SLURM_JOB_ID",))),
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        (("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",)),
    ),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", (("PMI_JOBID",), ("SLURM_JOB_ID",))),
    _Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", (("SLURM_JOB_ID", "SLURM_STEP_ID"),)),
)


class Launch(NamedTuple):
    """A process of a job.

    Attributes
    ----------
    rank, size : int
    ranks_per_host : int or None
        None if the launcher does not tell it, or if it differs between hosts.
    host : str
        Name or address of rank 0's host.
    port : int
        Where rank 0 listens.
    token : str
        Tells this job from others.
    """

    rank: int
    size: int
    ranks_per_host: int | None = None
    host: str = "127.0.0.1"
    port: int = 29500
    token: str = _NO_TOKEN

    @property
    def where(self) -> str:
        """Host and port as text."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def launch_of(environment: Mapping[str, str]) -> Launch:
    """Reads the variables of torchrun, Open MPI, MPICH and its relatives, or Slurm.

    Raises
    ------
    ValueError
        Variables are missing or have no meaning. The text names the variable.
    """
    launcher = next((one for one in _LAUNCHERS if one.rank in environment and one.size in environment), None)
    if launcher is None:
        wanted = "; ".join(f"{one.rank} and {one.size}" for one in _LAUNCHERS)
        raise ValueError(f"environment: expected the variables of a launcher ({wanted}), and there are none")
    size = _number(environment, launcher.size)
    if not 1 <= size < 2**31:
        raise ValueError(f"{launcher.size}: expected a positive number of ranks, got {size}")
    rank = _number(environment, launcher.rank)
    if not 0 <= rank < size:
        raise ValueError(f"{launcher.rank}: expected 0 to {size - 1}, below {launcher.size}, got {rank}")
    in_host = _number(environment, launcher.ranks_per_host, "0")
    host = environment.get("MASTER_ADDR", "127.0.0.1")
    if not host.strip():
        raise ValueError(f"MASTER_ADDR: expected a name or an address of rank 0's host, got {host!r}")
    port = _number(environment, "MASTER_PORT", "29500")
    if not 1 <= port <= 65535:
        raise ValueError(f"MASTER_PORT: expected a port from 1 to 65535, got {port}")
    in_host_or_none = in_host if in_host > 0 and size % in_host == 0 else None
    return Launch(rank, size, in_host_or_none, host, port, _token(environment, launcher))


def _token(environment: Mapping[str, str], launcher: _Launcher) -> str:
    for names in ((JOB_TOKEN,), *launcher.jobs):
        found = [environment.get(name, "") for name in names]
        if all(found) and found != ["none"]:  # torchrun's id of a run that was given none
            return "/".join(found)
    return _NO_TOKEN


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(str(text))
    except ValueError:
        raise ValueError(f"{name}: expected an int, got {text!r}") from None
