"""A reward function that logs what it is told of the run's progress."""


def told(completions, trainer_state, log_metric, **columns):
    log_metric("state/step", trainer_state.global_step)
    log_metric("state/epoch", trainer_state.epoch)
    return [0.0] * len(completions)
