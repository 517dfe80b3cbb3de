"""The array module under the language model: NumPy or CuPy, and the few things that the two do differently.

The model is written once, on `Arrays`. NumPy computes in one dtype throughout. CuPy keeps activations and the operands
of matrix products in bfloat16, unless float32 is asked for, and everything that adds up (products, residual stream,
norms, softmax, loss, optimizer) in float32.
"""

from __future__ import annotations

import abc
import functools
import gc
import inspect
import tracemalloc
from collections.abc import Callable
from types import ModuleType

import numpy as np

__all__ = ["Arrays", "CupyArrays", "NumpyArrays", "SetupError", "select_arrays"]


class SetupError(Exception):
    """The training cannot begin; the text says why, and what to do."""


class Arrays(abc.ABC):
    """An array module with its dtypes.

    Attributes
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    dtype : numpy.dtype
        Dtype of activations and of the operands of matrix products.
    wide : numpy.dtype
        Dtype of sums and of everything that is kept from step to step; equal to `dtype` or wider.
    device : str
        Name of the device, or ``NumPy``.
    memory_meaning : str
        Description of the number that `peak_bytes` returns.
    """

    xp: ModuleType
    dtype: np.dtype
    wide: np.dtype
    device: str
    memory_meaning: str

    @abc.abstractmethod
    def matmul(self, a, b, dtype: np.dtype | None = None, out=None):
        """Multiplies 2-D arrays, or two stacks of matrices (3-D), in `dtype`, or into `out`.

        Both operands may be transposed views. Sums are in the wide dtype, whatever the dtype of the result.
        """

    @abc.abstractmethod
    def pointwise(self, function: Callable) -> Callable:
        """Returns ``function(xp, *arrays)``, element by element in the wide dtype, as a function of the arrays."""

    @abc.abstractmethod
    def to_host(self, array) -> np.ndarray:
        """Returns the array as NumPy's, once it is computed."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Returns when all work is done."""

    @abc.abstractmethod
    def start_memory_count(self) -> None:
        """Begins a count: earlier allocations do not enter `peak_bytes`."""

    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Returns the peak memory since `start_memory_count`; the first call must follow one training step."""


class NumpyArrays(Arrays):
    """NumPy, in float32 (float64 for gradient checks)."""

    xp = np
    device = "NumPy"
    memory_meaning = "NumPy's and Python's allocations in the first step, counted by tracemalloc"

    def __init__(self, dtype: object = np.float32):
        self.dtype = self.wide = np.dtype(dtype)
        self._peak: int | None = None

    def matmul(self, a, b, dtype=None, out=None):
        """Implements `Arrays.matmul`; there is one dtype."""
        return np.matmul(a, b, out=out)

    def pointwise(self, function):
        """Implements `Arrays.pointwise`."""
        return functools.partial(function, np)

    def to_host(self, array):
        """Implements `Arrays.to_host`."""
        return np.asarray(array)

    def synchronize(self):
        """Does nothing: NumPy's calls return when their work is done."""

    def start_memory_count(self):
        """Implements `Arrays.start_memory_count`."""
        gc.collect()
        self._peak = None
        tracemalloc.start()

    def peak_bytes(self):
        """Returns the peak up to the first call, which ends the tracing: it would slow every later step down."""
        if self._peak is None:
            self._peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return self._peak


class CupyArrays(Arrays):
    """CuPy on the current device, with matrix products of bfloat16 on the tensor cores, or of float32."""

    memory_meaning = "what CuPy's memory pool took from the driver"

    def __init__(self, dtype: str = "bfloat16"):
        import cupy
        import ml_dtypes
        from cupy.cuda import device, runtime

        try:
            from cupy_backends.cuda.libs import cublas
        except ImportError as error:
            raise SetupError(
                "the language model needs cuBLAS for its matrix products, and CuPy does not find it: "
                "pip install nvidia-cublas-cu12 (for CUDA 13: nvidia-cublas)"
            ) from error
        self.xp = cupy
        bfloat16, self.wide = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
        self.dtype = {"bfloat16": bfloat16, "float32": self.wide}[dtype]
        self.device = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
        self._cublas, self._handle = cublas, device.get_cublas_handle
        self._cuda_types = {bfloat16: runtime.CUDA_R_16BF, self.wide: runtime.CUDA_R_32F}
        # Read by cuBLAS on the host, at these addresses: the arrays live as long as self.
        self._factors = np.array([1, 0], np.float32)
        self._one, self._zero = self._factors.ctypes.data, self._factors[1:].ctypes.data
        self._pool: object | None = None
        self._product = self._choose_product()

    def matmul(self, a, b, dtype=None, out=None):
        """Implements `Arrays.matmul`."""
        if out is None:
            out = self.xp.empty((*a.shape[:-1], b.shape[-1]), dtype or self.dtype)
        self._product(a, b, out)
        return out

    def _choose_product(self) -> Callable:
        try:
            if self._blas_product_is_right():
                return self._blas_product
            reason = "wrong results in a trial"
        except Exception as error:  # whatever this CuPy, cuBLAS or GPU objects to
            reason = f"{type(error).__name__}: {error}"
        print(
            f"note: CuPy's matrix products in float32 take the place of cuBLAS' own, which do not work here ({reason})"
        )
        return self._float32_product

    def _blas_product_is_right(self) -> bool:
        xp, rng = self.xp, np.random.default_rng(0)

        def as_transposed_view(x):
            return xp.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)

        for stack in ((), (3,)):
            shapes = ((*stack, 16, 24), (*stack, 24, 8))
            a, b = (xp.asarray(rng.standard_normal(shape, np.float32)).astype(self.dtype) for shape in shapes)
            wanted = np.matmul(a.get().astype(np.float32), b.get().astype(np.float32))
            for left in (a, as_transposed_view(a)):
                for right in (b, as_transposed_view(b)):
                    for dtype, tolerance in ((self.dtype, 0.1), (self.wide, 1e-4)):
                        result = xp.full(wanted.shape, np.nan, np.float32).astype(dtype)
                        self._blas_product(left, right, result)
                        if not np.allclose(result.get().astype(np.float32), wanted, rtol=0, atol=tolerance):
                            return False
        return True

    def _blas_product(self, a, b, out) -> None:
        # cuBLAS itself, because cupy.matmul of CuPy 14 refuses stacks of bfloat16 matrices (cupy/cupy#10317) and rounds
        # every product to bfloat16, weight gradients included. cuBLAS counts columns first: out^T = b^T a^T.
        (m, k), n = a.shape[-2:], b.shape[-1]
        (form_a, stride_a), (form_b, stride_b) = _blas_form(a), _blas_form(b)
        of_a, of_b, of_out = (self._cuda_types[x.dtype] for x in (a, b, out))
        compute, algorithm = self._cublas.CUBLAS_COMPUTE_32F, self._cublas.CUBLAS_GEMM_DEFAULT
        if a.ndim == 2:
            self._cublas.gemmEx(
                self._handle(), form_b, form_a, n, m, k, self._one, b.data.ptr, of_b, stride_b,
                a.data.ptr, of_a, stride_a, self._zero, out.data.ptr, of_out, n, compute, algorithm,
            )  # fmt: skip
        else:
            step_a, step_b, step_out = (x.strides[0] // x.itemsize for x in (a, b, out))
            self._cublas.gemmStridedBatchedEx(
                self._handle(), form_b, form_a, n, m, k, self._one, b.data.ptr, of_b, stride_b, step_b,
                a.data.ptr, of_a, stride_a, step_a, self._zero, out.data.ptr, of_out, n, step_out, len(out),
                compute, algorithm,
            )  # fmt: skip

    def _float32_product(self, a, b, out) -> None:
        out[...] = self.xp.matmul(a.astype(self.wide, copy=False), b.astype(self.wide, copy=False))

    def pointwise(self, function):
        """Implements `Arrays.pointwise`: one kernel by ``cupy.fuse``, or one operation at a time if that fails."""
        plain = functools.partial(function, self.xp)
        fused = self.xp.fuse(kernel_name=function.__name__)(lambda *arrays: plain(*arrays))
        # Not zero anywhere, and not the same in all arguments, so that a mix-up shows.
        count = len(inspect.signature(function).parameters) - 1
        trial = [self.xp.linspace(-3 + i, 4 + i, 32, dtype=self.wide) for i in range(count)]
        try:
            result, wanted = fused(*trial), plain(*trial)
            right = result.dtype == self.wide and bool(self.xp.allclose(result, wanted, rtol=1e-4, atol=1e-5))
        except Exception:  # experimental in CuPy, and only a matter of speed
            right = False
        return fused if right else plain

    def to_host(self, array):
        """Implements `Arrays.to_host`."""
        return array.get()

    def synchronize(self):
        """Implements `Arrays.synchronize`."""
        self.xp.cuda.get_current_stream().synchronize()

    def start_memory_count(self):
        """Gives the memory of an earlier count back and goes on with an empty pool."""
        gc.collect()
        (self._pool or self.xp.get_default_memory_pool()).free_all_blocks()
        self._pool = self.xp.cuda.MemoryPool()
        self.xp.cuda.set_allocator(self._pool.malloc)

    def peak_bytes(self):
        """Implements `Arrays.peak_bytes`. The pool gives nothing back by itself, so that its size is the peak."""
        return self._pool.total_bytes()


def _blas_form(matrix) -> tuple[int, int]:
    """Returns (transposed, elements from line to line) of the last two axes; cuBLAS reads them columns first."""
    row, column = (stride // matrix.itemsize for stride in matrix.strides[-2:])
    if column == 1:
        return 0, row
    if row == 1:
        return 1, column
    raise ValueError(f"a matrix must be contiguous along an axis, got {matrix.shape} with strides {matrix.strides}")


def select_arrays(device: str, dtype: str = "bfloat16") -> Arrays:
    """Returns `Arrays` for ``"cpu"``, ``"gpu"`` or ``"auto"`` (the GPU if there is one); `dtype` is for `CupyArrays`.

    Raises
    ------
    SetupError
        There is no GPU to be used although one was asked for, or cuBLAS is missing.
    """
    if device == "cpu":
        return NumpyArrays()
    try:
        import cupy

        found = cupy.cuda.runtime.getDeviceCount() > 0
        reason = "the driver reports none"
    except Exception as error:  # no CuPy, or CuPy without a driver, which raises its own kind
        found, reason = False, str(error)
    if found:
        return CupyArrays(dtype)
    if device == "gpu":
        raise SetupError(f"no GPU to train on: {reason}")
    return NumpyArrays()
