"""Settings in, a run out: builds it, trains or resumes it, restarts lost ranks, and closes it.

The only package that knows the concrete classes of engines, policies and verifiers.
"""
