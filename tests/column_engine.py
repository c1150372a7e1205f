"""An engine whose tokens have two columns that the package does not know, and a loss that uses them."""

from pathlib import Path

import numpy as np

from dapo_rl.base.load import load_function

PlainEngine = load_function(f"{Path(__file__).parents[1] / 'examples' / 'own_engine.py'}:PlainEngine")
LAYERS, EXPERTS = 2, 3


def teacher_of(token_ids):
    """A teacher's log-probability of each token."""
    return -0.01 * np.asarray(token_ids, np.float32)


def routing_of(token_ids):
    """The experts of each token, `[tokens, layers, k]`."""
    return (
        np.asarray(token_ids, np.int16)[:, None, None] + np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)
    ).astype(np.int16)


class ColumnEngine(PlainEngine):
    def _next_tokens(self, samples):
        for (_, begun), (request, written) in zip(samples, super()._next_tokens(_without(samples)), strict=True):
            token = written.token_ids[-1:]
            more = {"teacher_logps": teacher_of(token), "routing": routing_of(token)}
            yield request, begun.then(token, written.logps[-1:], self.version, **more)


def _without(samples):
    known = ("token_ids", "logps", "versions", "mask")
    return [(request, begun.replace(columns={name: begun[name] for name in known})) for request, begun in samples]


def loss(new_logps, old_logps, advantages, mask, *, teacher_logps, routing, token_ids):
    """Fails unless both columns are there and are those of the tokens."""
    ids = token_ids.cpu().numpy()
    whole = mask.cpu().numpy()
    assert routing.shape == (*mask.shape, LAYERS, EXPERTS)
    assert (routing.cpu().numpy()[whole] == routing_of(ids[whole])).all()
    assert np.allclose(teacher_logps.cpu().numpy()[whole], teacher_of(ids[whole]))
    return -(new_logps - old_logps).exp() * advantages


def odd(completion_ids, **columns):
    """A reward that differs within most groups."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def check_rollouts(files):
    """Every sample of the rollout log has the columns of its tokens. Returns the number of samples."""
    import pyarrow.parquet as pq

    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    for row in rows:
        assert np.allclose(row["teacher_logps"], teacher_of(row["token_ids"]))
        assert np.array_equal(row["routing"], routing_of(row["token_ids"]))
    return len(rows)
