"""One rank: checks and times the schemes, and their peer, together with the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

import fa2cupy
import fa2cupy.distributed as dist

from .jobs import GRAPH, OPERATIONS, PEER, SCHEMES, Job, Measurement, part_of, share_of
from .torch_ring import TorchRing, TorchRingWork

#: Rows of a rank that are compared with float64.
SAMPLES = 64
#: Approximate seconds for the timed calls of one scheme and its baseline.
BUDGET_S = 6.0


class Work:
    """Forward and backward on arrays that stay the same."""

    def __init__(self, forward: Callable[..., tuple], backward: Callable[..., tuple], arrays: Sequence):
        self.inputs = arrays
        self._forward, self._backward = partial(forward, causal=True), partial(backward, causal=True)
        self._saved = self.forward()

    def forward(self) -> tuple:
        """Returns o and lse."""
        return self._forward(*self.inputs[:3])

    def backward(self) -> tuple:
        """Returns the gradients, from the results of the first forward."""
        return self._backward(*self.inputs[:3], *self._saved, self.inputs[3])

    def training(self, **options: object) -> tuple:
        """Returns o, lse, dq, dk and dv of a forward and its backward."""
        saved = self.forward()
        return (*saved, *self._backward(*self.inputs[:3], *saved, self.inputs[3], **options))


class Rank:
    """Measures jobs together with the other ranks.

    Parameters
    ----------
    comm : Communicator
    device : HostDevice or GpuDevice
    make_peer : callable, optional
        Returns the `TorchRing` of this rank.
    """

    def __init__(self, comm: dist.Communicator, device, make_peer: Callable[[], TorchRing] | None = None):
        self.comm, self.device, self.xp = comm, device, device.xp
        self._make_peer, self._peer = make_peer, None

    def meet(self) -> None:
        """Lets all ranks begin at the same time."""
        dist.unshard(self.comm, self.xp.zeros((1,), "float32"), axis=0, order="contiguous")

    def everyones(self, *values: float) -> np.ndarray:
        """Returns the values of all ranks, a row for each."""
        own = self.xp.asarray([values], "float64")
        return self.device.to_host(dist.unshard(self.comm, own, axis=0, order="contiguous"))

    def measure(self, job: Job) -> Measurement:
        """Checks and times a job."""
        self.device.release()
        problem = job.problem
        own = self.device.draw(part_of(problem, seqlen=problem.seqlen // job.ranks))
        if job.scheme == PEER:
            return self._measure_peer(job, own)
        work = self._scheme(job, job.scheme, own)
        is_whole = problem.seqlen <= self.device.whole_rows
        error, equal = (self._whole_check if is_whole else self._sampled_check)(job, work)
        found = self.everyones(error, equal)
        result = Measurement("one call" if is_whole else "samples", float(found[:, 0].max()), bool(found[:, 1].all()))
        if result.wrong(problem.dtype):
            return result
        self.device.release()
        extra = [self.device.extra_bytes(call) for call in (work.forward, work.backward)]
        times, alone, host = self._times(job, work)
        most = None if None in extra else int(self.everyones(*extra).max())
        if most is not None and job.scheme in ("heads", "gather"):
            most += self.comm.window_bytes
        return result._replace(extra_bytes=most, times=times, alone=alone, host=host)

    def _scheme(self, job: Job, scheme: str, own: Sequence) -> Work:
        forward, backward = (partial(call, self.comm, scheme=scheme) for call in (dist.forward, dist.backward))
        return self._work(job, forward, backward, own)

    def _work(self, job: Job, forward: Callable[..., tuple], backward: Callable[..., tuple], arrays: Sequence) -> Work:
        """Returns the work of both calls, which take documents without the axis of one sequence that arrays have."""
        if job.documents == 1:
            return Work(forward, backward, arrays)
        offsets, longest = self.xp.asarray(job.offsets), int(np.diff(job.offsets).max())
        packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}

        def on_rows(call: Callable[..., tuple], *given, **options: object) -> tuple:
            return tuple(one[None] for one in call(*(array[0] for array in given), **packed, **options))

        return Work(partial(on_rows, forward), partial(on_rows, backward), arrays)

    def _whole_check(self, job: Job, work: Work) -> tuple[float, bool]:
        """Returns the largest error against one call on the whole sequence, and whether o and lse are equal."""
        whole = [dist.unshard(self.comm, array) for array in work.inputs]
        wanted = self._work(job, fa2cupy.forward, fa2cupy.backward, whole).training()
        wanted = [dist.shard(self.comm, one, axis=axis) for one, axis in zip(wanted, (1, 2, 1, 1, 1), strict=True)]
        found = work.training()
        errors = [relative_error(one, other) for one, other in zip(found, wanted, strict=True)]
        return max(errors), all(is_equal(one, other) for one, other in zip(found[:2], wanted[:2], strict=True))

    def _sampled_check(self, job: Job, work: Work) -> tuple[float, bool]:
        """Returns the largest error of some rows against float64, and whether two calls are equal."""
        found = work.training(deterministic=True)
        again = work.training(deterministic=True)
        equal = all(is_equal(one, other) for one, other in zip(found, again, strict=True))
        del again
        return max(self._sampled_errors(job, work.inputs, found)), equal

    def _sampled_errors(self, job: Job, own: Sequence, found: Sequence) -> Iterator[float]:
        """Yields the errors of o, lse and dq in a query head, and of dk and dv in its K/V head, for some rows."""
        xp, (q, k, v, do), (o, lse, dq, dk, dv) = self.xp, own, found
        seqlen, scale = q.shape[1] * self.comm.size, q.shape[-1] ** -0.5
        rows = xp.asarray(np.unique(np.linspace(0, q.shape[1] - 1, SAMPLES).astype(int)))
        mine = xp.asarray(dist.positions(self.comm, seqlen))[rows][:, None]
        everywhere = xp.arange(seqlen)[None]
        document = xp.asarray(np.searchsorted(job.offsets, np.arange(seqlen), side="right"))
        elsewhere = document[everywhere] != document[mine]
        head_kv, group = k.shape[2] - 1, q.shape[2] // k.shape[2]
        first = head_kv * group

        def some(array, head: int):
            return array[0, :, head][rows].astype("float64")

        def whole(array, head: int):
            return dist.unshard(self.comm, array[:, :, head])[0].astype("float64")

        all_k, all_v, some_do = whole(k, head_kv), whole(v, head_kv), some(do, first)
        scores = scale * some(q, first) @ all_k.T
        scores[(everywhere > mine) | elsewhere] = -np.inf
        largest = scores.max(axis=1, keepdims=True)
        wanted_lse = largest + xp.log(xp.exp(scores - largest).sum(axis=1, keepdims=True))
        p = xp.exp(scores - wanted_lse)
        wanted_o = p @ all_v
        p *= some_do @ all_v.T - (some_do * wanted_o).sum(axis=1, keepdims=True)
        yield relative_error(some(o, first), wanted_o)
        yield relative_error(lse[0, first][rows].astype("float64"), wanted_lse[:, 0])
        yield relative_error(some(dq, first), scale * p @ all_k)
        del all_k, all_v, scores, p

        some_k, some_v = some(k, head_kv), some(v, head_kv)
        wanted_dk, wanted_dv = xp.zeros(some_k.shape), xp.zeros(some_v.shape)
        for head in range(first, first + group):
            all_q, all_do = whole(q, head), whole(do, head)
            delta = (whole(o, head) * all_do).sum(axis=1)
            p = xp.exp(scale * some_k @ all_q.T - dist.unshard(self.comm, lse[:, head])[0].astype("float64"))
            p[(everywhere < mine) | elsewhere] = 0
            wanted_dv += p @ all_do
            p *= some_v @ all_do.T - delta
            wanted_dk += scale * p @ all_q
        yield relative_error(some(dk, head_kv), wanted_dk)
        yield relative_error(some(dv, head_kv), wanted_dv)

    def _times(self, job: Job, work) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float]]:
        """Returns the milliseconds of calls by operation: of the work, of the baseline if there is one, of the host."""
        works = {"work": work}
        share = share_of(job.problem, job.ranks)
        if share is not None:
            works["alone"] = self._work(job, fa2cupy.forward, fa2cupy.backward, self.device.draw(share))
        calls = self._warm_up(list(works.values()))
        timed = {(name, op): getattr(one, op) for op in OPERATIONS for name, one in works.items()}
        # Beyond this length the host's time does not count, and the memory of a graph would be kept.
        if job.scheme in SCHEMES and job.documents == 1 and job.problem.seqlen <= self.device.whole_rows:
            launch = self.device.captured(work.training)
            timed |= {} if launch is None else {("work", GRAPH): launch}
        work.forward()  # keeps the GPU busy while the first turn is queued
        times: dict[tuple[str, str], list[float]] = {key: [] for key in timed}
        host: dict[tuple[str, str], list[float]] = {key: [] for key in times}
        queued: list[list[tuple]] = []
        for _ in range(calls):
            queued.append([])
            for key, call in timed.items():
                self.meet()
                start, begin = self.device.mark(), time.perf_counter()
                call()
                host[key].append(1e3 * (time.perf_counter() - begin))
                queued[-1].append((key, start, self.device.mark()))
            # The host is one turn ahead of the GPU, so that the clock does not count how fast it queues calls.
            if len(queued) > 1:
                self._collect(queued.pop(0), times)
        self._collect(queued.pop(0), times)
        found = [{op: times[name, op] for name, op in timed if name == wanted} for wanted in ("work", "alone")]
        return found[0], found[1], {op: min(host["work", op]) for op in found[0]}

    def _collect(self, turn: Iterable[tuple], times: Mapping[tuple[str, str], list[float]]) -> None:
        for key, start, stop in turn:
            times[key].append(self.device.milliseconds(start, stop))

    def _warm_up(self, works: Sequence) -> int:
        """Works until the clocks are those of a warm GPU; returns how often each call is to be timed."""
        spent = 0.0
        while True:
            start = self.device.mark()
            for work in works:
                work.training()
            seconds = float(self.everyones(self.device.milliseconds(start, self.device.mark())).max()) / 1e3
            spent += seconds
            if spent >= self.device.warm_s:
                return max(1, min(self.device.most_calls, int(BUDGET_S / max(2 * seconds, 1e-3))))

    def _measure_peer(self, job: Job, own: Sequence) -> Measurement:
        """Measures PyTorch's ring, with the results of ``"gather"`` as the standard."""
        work, error, missing = None, 0.0, ""
        wanted = self._scheme(job, "gather", own).training()
        try:
            if self._peer is None:
                self._peer = self._make_peer()
            work = TorchRingWork(self._peer, own)
            found = work.arrays()
            others = (wanted[0], *wanted[2:])
            error = max(relative_error(one, other) for one, other in zip(found, others, strict=True))
            del found, others
        except Exception as failure:  # PyTorch missing, another version, or no memory: it is not ours
            missing = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
        del wanted
        states = self.everyones(bool(missing), error)
        result = Measurement("gather", float(states[:, 1].max()), None, missing=missing)
        if states[:, 0].any():
            return result._replace(missing=missing or "another rank could not make the call")
        if wrong := result.wrong(job.problem.dtype):
            return result._replace(missing=f"its results are not ours: {wrong}")
        self.device.release()
        extra = [self._peer.peak_bytes(call) - tensor_bytes(call) for call in (work.forward, work.backward)]
        times, alone, host = self._times(job, work)
        most = int(self.everyones(max(0, *extra)).max())
        del work
        self._peer.release()
        return result._replace(extra_bytes=most, times=times, alone=alone, host=host)


def tensor_bytes(call: Callable[[], tuple]) -> int:
    """Returns the bytes of the tensors that a call returns."""
    return sum(one.nbytes for one in call() if hasattr(one, "nbytes"))


def relative_error(found, wanted) -> float:
    """Returns the largest error over the largest value, or inf for a NaN, which a maximum could hide."""
    wide = "float64" if wanted.dtype == np.float64 else "float32"
    wanted = wanted.astype(wide)
    largest = float(abs(wanted).max())
    error = float(abs(found.astype(wide) - wanted).max()) / max(largest, 1e-30)
    return error if error == error else np.inf


def is_equal(one, other) -> bool:
    """Returns True if all elements are equal; NaN is not."""
    return bool((one == other).all())
