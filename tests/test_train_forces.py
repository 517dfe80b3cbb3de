"""The energy model of scripts/train_forces.py: gradients of its loss, both attentions, the script from end to end."""

from __future__ import annotations

import numpy as np
import pytest
import train_forces
from train_forces import Energy, pair_energies, particles, train, written_out

import fa2cupy

SMALL = ("--device", "cpu", "--batch", "2", "--particles", "12", "--width", "16", "--heads", "2", "--steps", "3")


@pytest.mark.parametrize("attend", [fa2cupy.attention, written_out(np)], ids=["fused", "written out"])
def test_gradients_are_differences_of_the_loss(attend):
    options = train_forces.parse_arguments([*SMALL, "--dtype", "float64"])
    model, given = Energy(np, attend, options), particles(np, options, 0)
    model.loss(*given)
    layers = model.net.dense()
    assert len(layers) == 10
    gradients = [layer.gradient for layer in layers]
    random = np.random.default_rng(3)
    for layer, gradient in zip(layers, gradients, strict=True):
        weight, direction = layer.weight, random.standard_normal(layer.weight.shape)
        near = []
        for distance in (1e-6, -1e-6):
            layer.weight = weight + distance * direction
            near.append(model.loss(*given))
        layer.weight = weight
        assert (near[0] - near[1]) / 2e-6 == pytest.approx((gradient * direction).sum(), abs=1e-8)


def test_forces_are_differences_of_the_energy_to_be_learned():
    x, direction = np.random.default_rng(1).uniform(-1, 1, (2, 2, 5, 3))
    energy, forces = pair_energies(np, x)
    near = [pair_energies(np, x + distance * direction)[0] for distance in (1e-6, -1e-6)]
    assert energy.shape == (2,)
    np.testing.assert_allclose((near[0] - near[1]) / 2e-6, -(forces * direction).sum(axis=(1, 2)), atol=1e-8)


def test_both_attentions_have_the_same_losses_and_ours_takes_less_memory(capsys):
    options = [*SMALL, "--dtype", "float64", "--particles", "96", "--attention", "both"]
    assert train_forces.main(options) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("largest difference of losses ")
    results = [train(np, name, train_forces.parse_arguments(options)) for name in ("fused", "written out")]
    (ours, _, small), (theirs, _, large) = results
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    assert small < large


def test_it_learns():
    options = train_forces.parse_arguments([*SMALL, "--steps", "40"])
    losses, *_ = train(np, "fused", options)
    assert np.mean(losses[-5:]) < 0.4 * losses[0]


@pytest.mark.parametrize(("option", "message"), [(("--width", "15"), "--width: expected a multiple of the 2 heads")])
def test_wrong_arguments(option, message, capsys):
    with pytest.raises(SystemExit):
        train_forces.main([*SMALL, *option])
    assert message in capsys.readouterr().err
