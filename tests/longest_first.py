"""Which worker of `pytest -n` runs which tests, and when: a file at a time, and the longest first, so that all workers
end at the same time.

The last of three or more workers begins with the tests that mostly wait: for Slurm, for time limits, for processes to
end. With one worker more than cores, they overlap with tests that compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

SHARE = {"tests/cluster/": "Ray", "tests/board/test_browser": "the browser"}
"""These files share something that each worker would start for itself, which takes long."""
ALONE = ("tests/cluster/test_driver_killed.py", "tests/cluster/test_exit_reason.py", "tests/cluster/test_ray_ends.py")
"""These start a Ray of their own."""
COMPUTE = {
    "Ray": 300,
    "the browser": 150,
    "tests/e2e/test_training.py": 90,
    "tests/e2e/test_resume.py": 70,
    "tests/e2e/test_bad_input.py": 60,
    "tests/e2e/test_cli.py": 50,
    "tests/lab/test_bench.py": 50,
    "tests/evals/test_eval_run.py": 40,
    "tests/e2e/test_notebook.py": 35,
    "tests/fuzz/test_fuzz_state.py": 35,
    "tests/e2e/test_policy_judge_run.py": 30,
    "tests/e2e/test_callbacks_run.py": 30,
    "tests/e2e/test_environment_examples.py": 30,
    "tests/e2e/test_environment_runs.py": 30,
    "tests/engines/native/test_in_flight.py": 25,
    "tests/e2e/test_closing.py": 25,
    "tests/e2e/test_coefficients_run.py": 25,
    "tests/e2e/test_distill_run.py": 25,
    "tests/e2e/test_from_trl.py": 25,
    "tests/e2e/test_full_disk.py": 25,
    "tests/train/test_off_policy.py": 25,
}
WAIT = {
    "tests/launch/test_launch_slurm.py": 160,
    "tests/cluster/test_ray_ends.py": 90,
    "tests/envs/test_hostile_environments.py": 80,
    "tests/rewards/test_reward_pool.py": 70,
    "tests/rewards/test_reward_processes.py": 50,
    "tests/launch/test_launch.py": 45,
    "tests/launch/test_launch_ray.py": 40,
    "tests/cluster/test_driver_killed.py": 40,
    "tests/envs/test_python_tool.py": 40,
    "tests/rewards/test_reward_control_group.py": 30,
    "tests/cluster/test_exit_reason.py": 20,
    "tests/envs/test_mcp_tools.py": 20,
}
"""About how many seconds the longest files take; they need not be exact. All others are shorter than these."""


def unit_of(test: str) -> str:
    """What one worker runs as a whole."""
    file = test.partition("::")[0]
    shared = (name for path, name in SHARE.items() if file.startswith(path) and file not in ALONE)
    return next(shared, file)


class LongestFirst(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        for_waiting = self.numnodes > 2 and node.gateway.id == f"gw{self.numnodes - 1}"

        def rank(unit: str) -> tuple[bool, int]:
            return (unit in WAIT) == for_waiting, WAIT.get(unit) or COMPUTE.get(unit, 0)

        self.workqueue.move_to_end(max(self.workqueue, key=rank), last=False)
        super()._assign_work_unit(node)
