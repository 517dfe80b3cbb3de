"""The arrays of each kind of call: their names, in the order in which they are passed."""

from __future__ import annotations

import functools

from ..problem.arguments import output_name

__all__ = ["IN_KERNELS", "TENSORS", "Arguments", "arguments_of"]

#: The arrays with rows of head_dim or head_dim_v columns.
TENSORS = frozenset(
    (
        "q", "k", "v", "o", "do", "dq", "dk", "dv", "k_cache", "v_cache", "o_parts", "qt", "kt", "vt", "ot", "dot",
        "dqt", "dkt", "dvt", "gdq", "gdk", "gdv", "gq", "gk", "gv", "gdo",
    )
)  # fmt: skip
#: Names of arrays in kernels, where they differ. ``do`` is a C++ keyword; second derivatives are symmetric.
IN_KERNELS = {
    "do": "dout", "gdq": "qt", "gdk": "kt", "gdv": "vt", "gq": "dqt", "gk": "dkt", "gv": "dvt", "gdo": "ot",
    "gdlse": "lset", "gdbias": "bias_tangent", "gdsink": "sink_tangent", "dbiast": "dbias", "gbias": "dbias",
    "dsinkt": "dsink", "gsink": "dsink",
}  # fmt: skip

#: By call: its inputs, those inputs that may be None, and its results.
_ARRAYS = {
    "forward": (("q", "k", "v"), (), ("o", "lse")),
    "delta": (("o", "do"), (), ("delta",)),
    "backward": (("q", "k", "v", "o", "lse", "do", "delta"), ("delta",), ("dq", "dk", "dv")),
    "decode": (
        ("q", "k_cache", "v_cache", "cache_seqlens", "k", "v", "block_table"),
        ("k", "v", "block_table"),
        ("o", "lse"),
    ),
    "merge": (("o_parts", "lse_parts"), (), ("o", "lse")),
    "tile_states": ((), (), ("states",)),
    "jvp": (("q", "k", "v", "qt", "kt", "vt"), ("qt", "kt", "vt"), ("o", "lse", "ot", "lset")),
    "output_jvp": (("q", "k", "v", "o", "lse", "qt", "kt", "vt"), ("qt", "kt", "vt"), ("ot", "lset")),
    "backward_jvp": (
        ("q", "k", "v", "o", "lse", "do", "qt", "kt", "vt", "ot", "lset", "dot", "dlset"),
        ("qt", "kt", "vt", "dot", "dlset"),
        ("dqt", "dkt", "dvt"),
    ),
    "double_backward": (
        ("q", "k", "v", "o", "lse", "do", "gdq", "gdk", "gdv"),
        ("gdq", "gdk", "gdv"),
        ("gq", "gk", "gv", "gdo"),
    ),
}


class Arguments:
    """The arrays of one kind of call.

    `arguments_of` makes one object for each kind of call, so that objects are compared and hashed by identity.

    Attributes
    ----------
    call : str
        The kind of call.
    inputs : tuple of str
        The arrays that the call reads.
    results : tuple of str
    names : tuple of str
        The inputs, then the results.
    kernel_names : tuple of str
        Their names in kernels, such as ``score_args0`` for ``score_args[0]``.
    labels : dict of str
        Their names in error messages.
    may_be_none : frozenset of str
        The inputs that may be None, and the results.
    seed : int or None
        The position of dropout's seed, which is passed as if it were an address.
    """

    def __init__(self, call: str, inputs: tuple[str, ...], optional: tuple[str, ...], results: tuple[str, ...]):
        self.call = call
        self.inputs = inputs
        self.results = results
        self.names = (*inputs, *results)
        renamed = [name.replace("[", "").replace("]", "") for name in self.names]
        self.kernel_names = tuple([IN_KERNELS.get(name, name) for name in renamed])
        self.seed = inputs.index("seed") if "seed" in inputs else None
        self.labels = {name: name if name in inputs else output_name(name) for name in self.names}
        self.may_be_none = frozenset((*optional, *results))


@functools.lru_cache(maxsize=None)
def arguments_of(call: str, features: tuple[str, ...] = (), gradients: tuple[str, ...] = ()) -> Arguments:
    """The arrays of a kind of call.

    Parameters
    ----------
    call : {"forward", "delta", "backward", "decode", "merge", "tile_states", "jvp", "output_jvp", "backward_jvp",
            "double_backward"}
    features : tuple of str, optional
        Further inputs, all optional.
    gradients : tuple of str, optional
        Further results.
    """
    inputs, optional, results = _ARRAYS[call]
    return Arguments(call, (*inputs, *features), (*optional, *features), (*results, *gradients))
