"""Every file that puts instructions into the table of decode; importing this fills it."""

from . import (  # noqa: F401
    arithmetic,
    async_copy,
    atomics,
    barriers,
    bits,
    bulk_copy,
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
