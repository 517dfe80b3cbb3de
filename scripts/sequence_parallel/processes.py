"""All ranks: threads on NumPy, or a process for each GPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial

from common.ranks import communicator, free_ports

import fa2cupy.distributed as dist
from fa2cupy.scaleout import two_hosts

from .devices import GpuDevice, HostDevice
from .jobs import PEER, Job, Measurement
from .rank import Rank
from .torch_ring import TorchRing

#: Seconds that a rank waits for messages, and this process for the next answer of the ranks.
TIMEOUT_S, PATIENCE_S = 600.0, 1800.0
#: Seconds between checks that the ranks are alive, and seconds that they may take to end.
POLL_S, EXIT_S = 1.0, 10.0


class RankError(RuntimeError):
    """A rank failed, so that the others have to be ended.

    Attributes
    ----------
    is_setup : bool
        True if the failure came before the first job: another start would fail, too.
    """

    def __init__(self, text: str, is_setup: bool = False):
        super().__init__(text)
        self.is_setup = is_setup


def on_host(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Measurement] | str]]:
    """Measures jobs on simulated ranks; yields the measurements of all ranks, or the reason of a failure."""

    def one_job(comm: dist.Communicator, job: Job) -> Measurement:
        return Rank(comm, HostDevice(comm.rank)).measure(job)

    for job in jobs:
        try:
            in_host = two_hosts(job.ranks)
            yield job, dist.simulate(job.ranks, partial(one_job, job=job), ranks_per_host=in_host, timeout=TIMEOUT_S)
        except Exception as error:  # the other jobs go on
            yield job, f"{type(error).__name__}: {error}"


def on_gpus(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Measurement] | str]]:
    """Measures jobs for one number of GPUs. After a failure new processes go on with the next job.

    Raises
    ------
    RankError
        A rank has failed before its first job.
    """
    left = list(jobs)
    while left:
        try:
            with started(tuple(left)) as answers:
                for found in answers:
                    yield left.pop(0), found
        except RankError as error:
            if error.is_setup:
                raise
            failed = left.pop(0)
            if failed.scheme == PEER:  # the peer may have ended the process
                left = [job for job in left if job.scheme != PEER]
            yield failed, str(error)


@contextlib.contextmanager
def started(jobs: Sequence[Job]) -> Iterator[Iterator[list[Measurement]]]:
    """Starts a process for each GPU, yields the answers of all, and ends the processes."""
    ranks, context = jobs[0].ranks, multiprocessing.get_context("spawn")
    answers, ports = context.Queue(), free_ports(2)
    processes = [
        context.Process(target=gpu_rank, args=(rank, ranks, ports, jobs, answers), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield collected(answers, processes, len(jobs))
    except BaseException:  # the other ranks wait for messages that do not come
        for process in processes:
            process.kill()
        raise
    finally:
        end = time.monotonic() + EXIT_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()


def collected(answers, processes: Sequence, count: int) -> Iterator[list[Measurement]]:
    """Yields the measurements of all ranks, job by job.

    Raises
    ------
    RankError
        A rank has failed or ended, or does not answer.
    """
    found: list[dict[int, Measurement]] = [{} for _ in range(count)]
    failures: dict[int, str] = {}  # by the number of the job, which is -1 before the first one
    for index in range(count):
        end = time.monotonic() + PATIENCE_S
        while len(found[index]) < len(processes):
            try:
                rank, place, answer = answers.get(timeout=POLL_S)
            except queue.Empty:
                ended = [rank for rank, process in enumerate(processes) if process.exitcode is not None]
                if failed := [failures[place] for place in (-1, index) if place in failures]:
                    raise RankError(failed[0], is_setup=-1 in failures) from None
                if dead := [rank for rank in ended if rank not in found[index]]:
                    raise RankError(f"the processes of ranks {dead} have ended") from None
                if time.monotonic() > end:
                    raise RankError(f"no answer within {PATIENCE_S:.0f} s") from None
                continue
            if isinstance(answer, str):
                failures.setdefault(place, f"rank {rank}: {answer}")
            else:
                found[place][rank] = answer
        yield [found[index][rank] for rank in range(len(processes))]


def gpu_rank(rank: int, ranks: int, ports: Sequence[int], jobs: Sequence[Job], answers) -> None:
    """Runs in the process of one GPU: puts a measurement for each job, or the text of the error that ended it."""
    place = -1
    try:
        comm = communicator(rank, ranks, ports[0], TIMEOUT_S, two_hosts(ranks))
        device = GpuDevice(rank)
        one = Rank(comm, device, partial(TorchRing, device.gpu, rank, ranks, ports[1]))
        one.everyones(rank)  # makes NCCL's communicator
        for place, job in enumerate(jobs):
            answers.put((rank, place, one.measure(job)))
    except BaseException as error:  # told by the parent, which ends the other ranks
        traceback.print_exc()
        answers.put((rank, place, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"))
