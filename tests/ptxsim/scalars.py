"""PTX's scalar types: their widths, NumPy types, bfloat16, rounding, and reductions."""

from __future__ import annotations

import numpy as np

__all__ = [
    "INT64",
    "NUMPY",
    "REDUCTIONS",
    "WIDTH",
    "bf16_to_f32",
    "f32_to_bf16",
    "halves_to_f32",
    "is_float",
    "round_to",
    "unsigned",
]

# Bits of a register of the type; predicates are kept apart.
WIDTH = {"pred": 0}
WIDTH |= dict.fromkeys(("b8", "u8", "s8"), 8)
WIDTH |= dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 16)
WIDTH |= dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 32)
WIDTH |= dict.fromkeys(("b64", "u64", "s64", "f64"), 64)

NUMPY = {"pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16}
NUMPY |= dict.fromkeys(("f16x2", "bf16x2", "tf32"), np.uint32)
NUMPY |= {f"s{w}": np.dtype(f"i{w // 8}").type for w in (8, 16, 32, 64)}
NUMPY |= {f"{kind}{w}": np.dtype(f"u{w // 8}").type for kind in "bu" for w in (8, 16, 32, 64)}

INT64 = np.int64

#: Reductions by their names in red, redux and cp.reduce.
REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def is_float(ty: str) -> bool:
    return ty[0] == "f" or ty.startswith("bf")


def unsigned(nbytes: int) -> type:
    """Returns the unsigned NumPy type of that many bytes."""
    return np.dtype(f"u{nbytes}").type


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Returns the bits of the nearest bfloat16, ties to even; NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = 0x7FFF
    return rounded


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def halves_to_f32(bits: np.ndarray, ty: str) -> np.ndarray:
    """Returns the float32 values of the bits of float16 or bfloat16 numbers."""
    return bf16_to_f32(bits) if ty == "bf16" else bits.view(np.float16).astype(np.float32)


def round_to(x: np.ndarray, dtype: type, mode: str) -> np.ndarray:
    """Rounds float64 values to a narrower float type in one of PTX's modes."""
    nearest = x.astype(dtype)
    if mode in ("rn", ""):
        return nearest
    back = nearest.astype(np.float64)
    if mode == "rz":
        return np.where(np.abs(back) > np.abs(x), np.nextafter(nearest, dtype(0)), nearest)
    if mode == "rm":
        return np.where(back > x, np.nextafter(nearest, dtype(-np.inf)), nearest)
    return np.where(back < x, np.nextafter(nearest, dtype(np.inf)), nearest)
