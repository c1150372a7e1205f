"""Shortens a command of the tests, in its own process before it starts; the server of forked commands imports this."""


def look_briefly_at_the_machine() -> None:
    """`dapo bench` measures the machine twice, for seconds each."""
    from dapo_rl.lab.bench import machine

    machine.TRIES, machine.AT_LEAST_S = 1, 0.0
