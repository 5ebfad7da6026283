"""Where and when the stages of the staged schedule run, as a table."""

import pytest
import torch

from freescale.embedding import collision
from freescale.pipeline.row_stages import Stage, plan_stages

REQUEST, COMPARE, RESOLVE = Stage

#            device, nearby: requests, before gradients,  meanwhile, in compare, at once
PLANS = {
    ("cpu", True): ("ahead", (REQUEST, COMPARE), (RESOLVE,), False, True),
    ("cpu", False): ("input", (REQUEST, COMPARE), (RESOLVE,), False, True),
    ("cuda", True): ("input", (), (REQUEST, COMPARE), True, False),
    ("cuda", False): ("input", (), (REQUEST, COMPARE), True, False),
}


@pytest.mark.parametrize(("device", "nearby"), PLANS)
def test_where_and_when_the_stages_run(device, nearby):
    plan = plan_stages(torch.device(device), nearby)
    found = (
        plan.request_lane,
        plan.before,
        plan.meanwhile,
        plan.resolve_in_compare,
        plan.prepare_at_once,
    )
    assert found == PLANS[device, nearby]


@pytest.mark.parametrize(("device", "nearby"), PLANS)
def test_each_stage_runs_once_and_in_order(device, nearby):
    """Nothing is compared that was not requested; rows are resident before they are pulled."""
    plan = plan_stages(torch.device(device), nearby)
    stages = [*plan.before, *plan.meanwhile]
    if plan.resolve_in_compare:
        stages.insert(stages.index(COMPARE) + 1, RESOLVE)
    assert stages == [REQUEST, COMPARE, RESOLVE]


def test_only_few_rows_on_one_machine_s_cpus_are_not_divided():
    least = collision._LEAST_BYTES["cpu"]
    few, many = least - 1, least
    divided = {
        (device, nearby): [
            plan_stages(torch.device(device), nearby).divides(*sizes)
            for sizes in ((few, few), (few, many), (many, few), (many, many))
        ]
        for device, nearby in PLANS
    }
    assert divided.pop(("cpu", True)) == [False, True, True, True]
    assert all(all(each) for each in divided.values())
