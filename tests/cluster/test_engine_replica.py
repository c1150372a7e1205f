"""What the driver remembers of an engine that was lost."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from dapo_rl.cluster.engine_actor import EngineReport, Totals
from dapo_rl.cluster.engine_replica import EngineReplica, Order
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.types import Trajectory


def begun(index, tokens):
    return Trajectory.nothing(index).then(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), 3)


@pytest.mark.parametrize(
    ("missing", "continued", "started"),
    [({0, 1, 2, 3}, [1, 3], [0, 2]), ({0, 3}, [3], [0]), ({1}, [1], []), ({2}, [], [2])],
)
def test_only_samples_that_have_not_come_back_are_sampled_again(missing, continued, started):
    request = Request("a", np.array([1]), 4, SamplingParams(max_new_tokens=9), 0, (begun(1, 2), begun(3, 5)), (0, 2))
    left = Order(7, request, missing).left()
    assert [sample.index for sample in left.partial] == continued
    assert list(left.starting) == started
    assert [len(sample.token_ids) for sample in left.partial] == [{1: 2, 3: 5}[index] for index in continued]


def test_what_an_engine_has_done_is_summed_over_its_actors():
    replica = EngineReplica(0, background=True, timeout_s=2.0, options={})
    replica.note(EngineReport((), (), Totals(10, 1.0, 1), 0.0, None))
    replica.note(EngineReport((), (), Totals(30, 2.0, 1), 0.0, None))
    assert replica.timeout_s == 2.0
    replica.end()
    assert replica.timeout_s > 2.0, "the first samples of the next actor may take longer"
    replica.note(EngineReport((), (), Totals(5, 0.5, 2), 0.0, None))
    assert replica.totals == Totals(35, 2.5, 3)


def test_a_report_that_is_on_its_way_is_no_silence():
    """The driver needs a moment to read it after it was stopped (Ctrl-Z)."""
    replica = EngineReplica(0, background=True, timeout_s=2.0, options={})
    replica._collecting, replica._asked = object(), time.monotonic() - 60
    replica._ray = SimpleNamespace(wait=lambda refs, timeout, **how: (refs if timeout else [], []))
    replica.check()


def test_the_orders_of_an_engine_are_handed_on_once():
    replica = EngineReplica(0, background=True, timeout_s=2.0, options={})
    request = Request("a", np.array([1]), 4, SamplingParams(max_new_tokens=9), 0)
    replica.submit(Order(1, request, {0, 2}))
    assert replica.load == 2
    assert [order.number for order in replica.end()] == [1]
    assert replica.end() == []
    assert replica.load == 0
    replica.flush()  # nothing is left to send
