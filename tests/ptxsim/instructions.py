"""Imports every file that adds instructions to the table of decode, which fills it."""

from . import (  # noqa: F401
    arithmetic,
    async_copy,
    atomics,
    barriers,
    bits,
    bulk_copy,
    carries,
    compare,
    control_flow,
    convert,
    load_store,
    mbarrier,
    moves,
    tensor_core,
    transcendental,
    warp,
    wgmma,
)
