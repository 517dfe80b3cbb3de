"""The list of kernel families, and which of them support a call, best first."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UnsupportedProblemError
from .device import DeviceInfo
from .family import Family
from .simt import SIMT
from .sm80 import SM80
from .sm80_float32 import SM80_FLOAT32
from .sm80_float64 import SM80_FLOAT64
from .sm90 import SM90
from .sm90_float32 import SM90_FLOAT32
from .sm90_latent import SM90_LATENT

__all__ = ["FAMILIES", "choose_family", "family_of_decode", "family_of_kernel", "supporting_families"]

#: The families in the order in which they are tried.
FAMILIES: tuple[Family, ...] = (SM90, SM90_LATENT, SM90_FLOAT32, SM80, SM80_FLOAT32, SM80_FLOAT64, SIMT)


def choose_family(
    operation: str,
    dtype: str,
    device: DeviceInfo,
    family: str | None = None,
    features: tuple[str, ...] = (),
    precision: str | None = None,
    columns: tuple[int, int] = (1, 1),
) -> Family:
    """The family for a call and dtype on a device, for arrays whose strides it takes. `choose` checks strides.

    Parameters
    ----------
    operation, dtype : str
        The call, or one of its operations. ``"backward"`` is the call, by any method.
    device : DeviceInfo
    family : str, optional
        Public name of the only families to consider.
    features : tuple of str, optional
        Features that it must have.
    precision : {None, "ieee", "split"}, optional
        As for `fa2cupy.forward`.
    columns : tuple of int, optional
        Columns of q and of v, which the family's kernels hold if those of any do.

    Raises
    ------
    ValueError
        `operation` or `family` does not exist.
    UnsupportedProblemError
        No family, or not the requested one, supports the operation and dtype on the device, or has the features.
    """
    supporting = supporting_families(operation, dtype, device, family, features, precision)
    return _of_columns(supporting, operation, columns)


def family_of_kernel(
    operation: str,
    dtype: str,
    device: DeviceInfo,
    family: str | None = None,
    features: tuple[str, ...] = (),
    columns: tuple[int, int] = (1, 1),
) -> Family:
    """The family whose kernel of an operation is the default one, where ``"backward"`` is that of ``single_pass``.

    Raises
    ------
    ValueError, UnsupportedProblemError
        As for `choose_family`.
    """
    supporting = supporting_families(operation, dtype, device, family, features)
    having = [one for one in supporting if one.supports(operation, dtype, device)]
    if having:
        return _of_columns(having, operation, columns)
    raise UnsupportedProblemError(f"family {supporting[0].public_name!r} has no kernel of {operation} for {dtype}")


def _of_columns(families: Sequence[Family], operation: str, columns: tuple[int, int]) -> Family:
    return next((one for one in families if one.why_not_columns(operation, *columns) is None), families[0])


def family_of_decode(dtype: str) -> Family:
    """The family whose kernel of ``decode`` takes a dtype, on every GPU that has one."""
    return next(one for one in reversed(FAMILIES) if dtype in one.dtypes and "decode" in one.operations)


def supporting_families(
    operation: str,
    dtype: str,
    device: DeviceInfo,
    family: str | None,
    features: tuple[str, ...],
    precision: str | None = None,
) -> list[Family]:
    """The families that support a call or operation with its features, best first; parameters as for `choose_family`.

    Raises
    ------
    ValueError, UnsupportedProblemError
        As for `choose_family`.
    """
    selected = [one for one in FAMILIES if family is None or one.public_name == family]
    if not selected:
        names = list(dict.fromkeys(one.public_name for one in FAMILIES))
        raise ValueError(f"family: expected one of {names}, got {family!r}")
    is_chosen = family is not None or precision == "split"
    candidates = [one for one in selected if dtype in one.dtypes and _has_precision(one, precision)]
    candidates = [one for one in candidates if is_chosen or one.is_default_on(device)]
    supporting = [one for one in candidates if one.supports_call(operation, dtype, device, features)]
    if not supporting:
        reason = _why_none(candidates, operation, dtype, device, family, features, precision)
        raise UnsupportedProblemError(f"{reason}. Families: {_listed_families()}")
    return supporting


def _listed_families() -> str:
    """The families, those with the same public name and GPUs as one."""
    dtypes: dict[tuple[str, str], tuple[str, ...]] = {}
    for one in FAMILIES:
        known = dtypes.get((one.public_name, one.gpus), ())
        dtypes[one.public_name, one.gpus] = tuple(dict.fromkeys(known + one.dtypes))
    return ", ".join(f"{name} ({', '.join(of)}; {gpus})" for (name, gpus), of in dtypes.items())


def _has_precision(one: Family, precision: str | None) -> bool:
    """True if a family computes with the precision that the caller requests."""
    return not one.multiplies_parts or precision != "ieee"


def _why_none(
    rows: Sequence[Family],
    operation: str,
    dtype: str,
    device: DeviceInfo,
    family: str | None,
    features: tuple[str, ...],
    precision: str | None,
) -> str:
    wanted = f"family {family!r}" if family else "no kernel family"
    if not rows:
        return f"{wanted} has no kernels for {dtype}{'' if precision is None else f' with precision={precision!r}'}"
    place = f"{device.name} ({device.arch})"
    if not any(one.supports_call(operation, dtype, device) for one in rows):
        if any(one.supports(name, dtype, device) for one in rows for name in one.operations):
            return f"{wanted} has {'no ' if family else ''}kernels of {operation} for {dtype} on {place}"
        if family:
            return f"{wanted} does not run on {place}: it needs {rows[0].gpus}"
        here = dict.fromkeys(d for one in FAMILIES for d in one.dtypes if one.supports_call(operation, d, device))
        others = " or ".join(here) or "none"
        return f"no kernel takes {dtype} on {place}: that needs {rows[-1].gpus}; here there is {others}"
    has_it = "does not have it" if family else "has it"
    missing = f"{', '.join(features)}: {wanted} for {operation} with {dtype} on {place} {has_it}"
    return f"{missing}; NumPy arrays can have all features"
