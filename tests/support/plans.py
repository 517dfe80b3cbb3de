"""Plans of calls that are not launched: kernels are chosen for a device that need not exist here."""

from __future__ import annotations

from fa2cupy.families.choice import choose
from fa2cupy.plan.plans import plan_backward, plan_delta, plan_forward
from fa2cupy.plan.stages import Plan
from fa2cupy.problem.options import CallOptions

__all__ = ["backward_plan", "delta_plan", "forward_plan"]


def forward_plan(problem, device, strides, config=None, family=None, num_splits=None) -> Plan:
    """Returns the plan of a forward, with tiles, a family and a number of splits if the test gives them."""
    options = CallOptions(config=config, family=family, num_splits=num_splits)
    return plan_forward(
        problem, device, strides, choose("forward", problem, device, strides, options, is_launched=False)
    )


def delta_plan(problem, device, strides) -> Plan:
    """Returns the plan of a delta."""
    return plan_delta(problem, device, strides, choose("delta", problem, device, strides, is_launched=False))


def backward_plan(problem, device, strides, method, config=None, family=None, *, with_delta=True, num_splits=1) -> Plan:
    """Returns the plan of a backward by one method (None: the default), without splits unless the test asks."""
    options = CallOptions(config=config, family=family, method=method, num_splits=num_splits)
    choice = choose("backward", problem, device, strides, options, is_launched=False)
    return plan_backward(problem, device, strides, choice, with_delta=with_delta)
