"""Exceptions of the package.

As in NumPy, a wrong type raises ``TypeError``, and a wrong shape or value raises ``ValueError``. The classes of this
module are for all other errors.
"""

__all__ = ["INSTALL_CUDA", "KernelCompileError", "KernelLaunchError", "UnsupportedProblemError"]

#: The part of messages that says how to install CuPy and the other packages that calls on a GPU need.
INSTALL_CUDA = "in the checkout of fa2cupy, pip install '.[cuda12]' ('.[cuda13]' with a driver for CUDA 13)"


class UnsupportedProblemError(NotImplementedError):
    """The call is meaningful, but no kernel of this package supports it; the text lists the supported calls."""


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel or is not usable; the text has the compiler's log and the path of the source."""


class KernelLaunchError(RuntimeError):
    """The CUDA driver refused to load or launch a compiled kernel."""
