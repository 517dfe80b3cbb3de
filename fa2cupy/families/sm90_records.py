"""The parameters of the kernels of the sm90 family, most of whose arrays are read and written through tensor maps."""

from __future__ import annotations

from .operations import ONE_TILE
from .records import LENGTHS, POINTER_RECORDS, SCALES, SCHEDULE, Record

__all__ = ["MAPPED", "RECORDS"]

_INPUT_MAPS = "q:input_map k:input_map v:input_map"
_GRADIENT_MAPS = f"{_INPUT_MAPS} dout:input_map"
_TANGENT_MAPS = "qt:input_map kt:input_map vt:input_map"
_STATISTICS = "lse:input_accum delta:input_accum"
_MOVED_STATISTICS = "lset:input_accum deltat:input_accum"
#: The record of each kernel.
RECORDS = {
    "forward": Record(
        f"{_INPUT_MAPS} o:output_map lse:output_accum tile_counter:counter",
        (),
        ("scale_log2",),
        LENGTHS + SCHEDULE,
    ),
    "backward": Record(
        f"{_GRADIENT_MAPS} dk:output_map dv:output_map {_STATISTICS} dq_accum:output_accum",
        (),
        SCALES,
        LENGTHS + SCHEDULE,
    ),
    "backward_dq": Record(
        f"{_GRADIENT_MAPS} dq:output_map {_STATISTICS} tile_counter:counter", (), SCALES, LENGTHS + SCHEDULE
    ),
    "backward_dkdv": Record(
        f"{_GRADIENT_MAPS} dk:output_map dv:output_map {_STATISTICS}", (), SCALES, LENGTHS + SCHEDULE
    ),
    # TMA loads dO, and threads read its rows for delta, which is null unless the caller gives it. So is the counter.
    "backward_both": Record(
        f"{_GRADIENT_MAPS} dq:output_map dk:output_map dv:output_map o:input dout_rows:input {_STATISTICS} "
        "tile_counter:counter",
        ("o", "dout_rows"),
        SCALES,
        LENGTHS + SCHEDULE,
    ),
    **{operation: POINTER_RECORDS[operation] for operation in ONE_TILE},
    "dbias": POINTER_RECORDS["dbias"]._replace(pointers=f"{_GRADIENT_MAPS} {_STATISTICS}", strides=()),
    # There are no maps of tangents that the call does not have.
    "jvp": Record(
        f"{_INPUT_MAPS} {_TANGENT_MAPS} o:output_map ot:output_map lse:output_accum lset:output_accum "
        "tile_counter:counter",
        (),
        SCALES,
        LENGTHS + SCHEDULE,
    ),
    "output_jvp": Record(
        f"{_INPUT_MAPS} {_TANGENT_MAPS} ot:output_map o:input lse:input_accum lset:output_accum tile_counter:counter",
        ("o",),
        SCALES,
        LENGTHS + SCHEDULE,
    ),
    "dq_jvp": Record(
        f"{_GRADIENT_MAPS} {_TANGENT_MAPS} dot:input_map dqt:output_map {_STATISTICS} {_MOVED_STATISTICS} "
        "tile_counter:counter",
        (),
        SCALES,
        LENGTHS + SCHEDULE,
    ),
    "dkdv_jvp": Record(
        f"{_GRADIENT_MAPS} {_TANGENT_MAPS} dot:input_map dkt:output_map dvt:output_map {_STATISTICS} "
        f"{_MOVED_STATISTICS}",
        (),
        SCALES,
        LENGTHS + SCHEDULE,
    ),
}
#: The tensors of each kernel that have tensor maps.
MAPPED = {
    operation: tuple(pointer.partition(":")[0] for pointer in record.pointers.split() if pointer.endswith("_map"))
    for operation, record in RECORDS.items()
}
# These have none, but are compared with others of the family, which must take the arrays, too.
MAPPED |= dict.fromkeys(ONE_TILE, MAPPED["backward"])
