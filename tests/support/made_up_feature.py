"""All that a feature takes: the diff that adds a made-up one to a copy of the checkout, and calls with it.

``lift=`` is an array with a number for each query head, which is added to the head's scores. `PLACES` are the places of
problem/features.py: a keyword and a row, the two formulas and one CUDA header.

    python made_up_feature.py numpy            with a patched copy in PYTHONPATH: calls on NumPy, and simulated ranks
    python made_up_feature.py kernels simt     the kernels of a family in the interpreter
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
from support import CHECKOUT

__all__ = ["PLACES", "patched_copy"]

#: For each file, texts that occur once in it and what stands there with the feature.
PLACES = {
    "fa2cupy/problem/features.py": (
        (
            "    key_padding_mask: AnyArray | None\n",
            "    key_padding_mask: AnyArray | None\n    lift: AnyArray | None\n",
        ),
        (
            '    "mask_mod": Feature(\n',
            '    "lift": Feature(\n'
            '        "kLift",\n'
            '        _has("lift"),\n'
            '        arrays={"lift": FeatureArray("input_accum", check_sink, (-3,))},\n'
            '        acts_on="scores",\n'
            '        example={"lift": (1,)},\n'
            '        aliases={"head_bias": "lift"},\n'
            "    ),\n"
            '    "mask_mod": Feature(\n',
        ),
    ),
    "fa2cupy/numerics/formulas.py": (
        (
            '        if "bias" in arrays:\n',
            '        if "lift" in arrays:\n'
            '            s = s + self._of_head("lift", part).astype(self.work)\n'
            '        if "bias" in arrays:\n',
        ),
    ),
    "fa2cupy/cpu/scores.py": (
        (
            '        if "bias" in arrays:\n',
            '        if "lift" in arrays:\n'
            '            tile += arrays["lift"].astype(s.dtype, copy=False)\n'
            '        if "bias" in arrays:\n',
        ),
    ),
    "kernels/common/score_mod.cuh": (
        ("kModifiesScores = Spec::kSoftcap ||", "kModifiesScores = Spec::kSoftcap || Spec::kLift ||"),
        ("(Spec::kBias || Spec::kScoreMod);", "(Spec::kBias || Spec::kLift || Spec::kScoreMod);"),
        ("!Spec::kSoftcap && !Spec::kBias &&\n", "!Spec::kSoftcap && !Spec::kBias && !Spec::kLift &&\n"),
        (
            "        if constexpr (Spec::kBias) x += kUnit * term.bias;\n",
            "        if constexpr (Spec::kBias) x += kUnit * term.bias;\n"
            "        if constexpr (Spec::kLift)\n"
            "            x += kUnit * params_.lift[params_.lift_strides.offset(batch_, head_, 0, 0)];\n",
        ),
    ),
}


def patched_copy(folder: Path) -> None:
    """Copies the package and the kernels to a folder and adds the feature there.

    Raises
    ------
    ValueError
        A text of `PLACES` does not occur exactly once.
    """
    for room in ("fa2cupy", "kernels"):
        shutil.copytree(CHECKOUT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in PLACES.items():
        path = folder / name
        text = path.read_text(encoding="utf-8")
        for old, new in changes:
            if text.count(old) != 1:
                raise ValueError(f"{old!r} occurs {text.count(old)} times in {name}")
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


def _lift(heads: int, dtype: str) -> np.ndarray:
    # Large enough to matter beside other heads; it changes no softmax of a head, only lse.
    return np.linspace(-1.5, 2.0, heads).astype("float64" if dtype == "float64" else "float32")


def on_numpy() -> None:
    """Checks calls on NumPy, what is read from the row, and calls by simulated ranks."""
    import pytest
    from support import ranks
    from support.feature_cases import SIZES, assert_close, check, inputs_of, options_of, run

    import fa2cupy
    from fa2cupy.families.device import DeviceInfo
    from fa2cupy.plan.specs import default_specs
    from fa2cupy.problem.choices import feature_combinations

    heads = SIZES["num_heads"]
    for dtype in ("float16", "float64"):
        check(inputs_of(dtype), lift=_lift(heads, dtype), **options_of("sink", dtype, SIZES))
    inputs, lift = inputs_of(), _lift(heads, "float64")
    plain, lifted = run(inputs), run(inputs, lift=lift)
    assert_close({"lse": plain["lse"] + lift[:, None]}, {"lse": lifted["lse"]})
    with pytest.raises(ValueError, match=r"^lift: expected shape \(4,\) to match q and k, got \(3,\)"):
        run(inputs, lift=lift[:3])
    with pytest.raises(TypeError, match="write lift"):
        run(inputs, head_bias=lift)

    assert feature_combinations("lift") == [("lift",)]
    for method in (None, "two_pass"):
        specs = default_specs(
            DeviceInfo.named("sm_90"), "float16", 64, True, method, features=("bias", "return_dbias", "lift")
        )
        of_scores = [spec for spec in specs if "bias" in spec.features]
        assert of_scores and all("lift" in spec.features for spec in of_scores)
        for spec in of_scores:
            without = fa2cupy.jit.spec.KernelSpec(**{**vars(spec), "features": ()})
            assert spec.shared_memory_bytes == without.shared_memory_bytes, "no bias is held beside another feature"

    sizes = {"seqlen_q": 48, "seqlen_k": 48}
    for scheme in ("heads", "gather"):
        for keywords in ({"causal": True}, options_of("padding", "float64", SIZES | sizes)):
            keywords = {"lift": lift, **keywords}
            inputs = inputs_of(**sizes)
            assert_close(ranks.on_ranks(2, inputs, how={"scheme": scheme}, **keywords), run(inputs, **keywords))


def in_kernels(family: str) -> None:
    """Checks a forward and a backward of a family in the interpreter."""
    import pytest
    from support.fake_cupy import place
    from support.fake_gpu import backward, forward
    from support.feature_cases import inputs_of
    from support.simulator import simulated_gpu

    from fa2cupy import TileConfig
    from fa2cupy.testing import Expectation

    dtype, config = {"simt": ("float32", TileConfig(8, 8, 2)), "sm80": ("float16", None)}[family]
    sizes = {"batch": 1, "seqlen_q": 21, "seqlen_k": 30, "num_heads": 2, "num_heads_kv": 1, "head_dim": 16}
    inputs = tuple(place(x) for x in inputs_of(dtype, **sizes))
    options = {"lift": place(_lift(2, dtype)), "causal": True}
    expected = Expectation(*inputs, **options)
    q, k, v, do = inputs
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, "sm_80") as launched:
        o, lse = forward(q, k, v, family=family, config=config, **options)
        dq, dk, dv = backward(q, k, v, o, lse, do, family=family, config=config, method="two_pass", **options)
    expected.check(o=o, lse=lse, dq=dq, dk=dk, dv=dv)
    named = {stage.spec.operation for stage in launched if "lift" in stage.spec.features}
    assert named == {"forward", "backward_dq", "backward_dkdv"}, named


if __name__ == "__main__":
    if sys.argv[1] == "numpy":
        on_numpy()
    else:
        in_kernels(sys.argv[2])
