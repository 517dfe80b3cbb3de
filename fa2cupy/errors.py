"""What goes wrong, by name.

A wrong kind of object is a ``TypeError`` and a wrong shape or value a ``ValueError``, as in NumPy. The classes here are
for the rest.
"""

__all__ = ["INSTALL_CUDA", "KernelCompileError", "KernelLaunchError", "UnsupportedProblemError"]

#: How messages name the installation of CuPy and what else calls on a GPU need.
INSTALL_CUDA = "in the checkout of fa2cupy, pip install '.[cuda12]' ('.[cuda13]' with a driver for CUDA 13)"


class UnsupportedProblemError(NotImplementedError):
    """The call is meaningful but no kernel of this package covers it; the text lists what is covered."""


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel, or is not usable; the text carries the log and where the source was written."""


class KernelLaunchError(RuntimeError):
    """The CUDA driver refused to load or launch a compiled kernel."""
